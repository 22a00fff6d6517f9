"""The end of `make demo`: prints a test clip's reference and transcript, and what to do next."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import sbkit.infer
from sbkit.data.manifest import Manifest


def main(run: Path) -> None:
    """Transcribe the first test clip of a run with its bundle."""
    clip = Manifest.read(run / "manifests" / "test.csv").row(0)
    with sbkit.infer.load(run / "bundle") as model:
        assert isinstance(model, sbkit.infer.Model), "the demo trains a recogniser"
        print(f"\n{clip.wav}\nreference   {clip.text}\nhypothesis  {model.transcribe(clip.wav).text}")
    if shutil.which("sbkit") is None:
        print(f"\nFirst: . {os.path.relpath(Path(sys.executable).with_name('activate'))}")
    print(f"\nErrors, curves and players: {run / 'report.html'}"
          f"\nThe model, for other runtimes too:     {run / 'bundle'}"
          f"\nTry it: sbkit transcribe {run / 'bundle'} {clip.wav}"
          "\nReal data: torchrun --nproc_per_node=8 train.py recipes/CommonVoice/ASR/CTC/hparams/large.yaml "
          "--language fr --data_folder CV_FOLDER/fr")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
