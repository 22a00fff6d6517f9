"""The end of `make demo`: prints a test clip's reference and transcript, what the model does where nobody speaks and
with changed speech, the curve of the loss, and what to do next."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import sbkit.infer
from sbkit.data.audio import read_utterance
from sbkit.data.manifest import Manifest
from sbkit.score.behaviour import SHORT_SECONDS, Behaviour, silences, speeches
from sbkit.score.report.data import read
from sbkit.score.report.sections import loss_in_text
from sbkit.system.console import table


def main(run: Path) -> None:
    """Transcribe the first test clip of a run with its bundle, and try its behaviour on a short battery."""
    test = Manifest.read(run / "manifests" / "test.csv")
    clip = test.row(0)
    with sbkit.infer.load(run / "bundle", expect=sbkit.infer.Model) as model:  # the demo trains a recogniser
        print(f"\n{clip.wav}\nreference   {clip.text}\nhypothesis  {model.transcribe(clip.wav).text}")
        rate = model.sample_rate
        clips = [(read_utterance(each.wav, each.start, each.duration, sample_rate=rate), each.text)
                 for each in map(test.row, range(min(10, len(test))))]
        trials = [*silences(rate, SHORT_SECONDS, times=1), *speeches(clips, rate)]
        tried = Behaviour.of(trials, [each.text for each in model.transcribe([each.signal for each in trials])], rate)
    for each in tried.tables:
        print(f"\n{each.title}\n{table(each.columns, each.rows)}\n{each.remark}")
    print(f"More of it: sbkit evaluate {run} --behaviour\n\n{loss_in_text(read(run))}")
    if shutil.which("sbkit") is None:
        print(f"\nFirst: . {os.path.relpath(Path(sys.executable).with_name('activate'))}")
    print(f"\nErrors, curves and players: {run / 'report.html'}"
          f"\nThe model, for other runtimes too:     {run / 'bundle'}"
          f"\nNext, speak to it on a web page:       sbkit serve {run / 'bundle'}"
          "\nReal data: torchrun --nproc_per_node=8 train.py recipes/CommonVoice/ASR/CTC/hparams/large.yaml "
          "--language fr --data_folder CV_FOLDER/fr")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
