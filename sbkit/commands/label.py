"""``sbkit label``: make a corpus from untranscribed recordings: a bundle's transcripts that are probably right."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.commands.options import (
    above,
    add_model,
    add_schemes,
    add_search,
    count,
    request_of,
    require_language_model,
    share,
)

if TYPE_CHECKING:
    from sbkit.infer.label_request import RecordingShard

#: Variables that SLURM sets for a task of an array: its id, the first id, and the number of tasks.
_SLURM = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT")
#: The difference of two ids; not set by every version.
_SLURM_STEP = "SLURM_ARRAY_TASK_STEP"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="a recogniser's bundle")
    parser.add_argument("files", metavar="AUDIO", nargs="+",
                        help="audio files, folders of them, a manifest.csv, or JSON lines")
    parser.add_argument("--to", metavar="CORPUS", type=Path, required=True,
                        help="folder for the corpus: labels and what was left out, no copies of audio")
    parser.add_argument("--calibrate", metavar="LIST", required=True,
                        help="manifest.csv or JSON lines of at least 40 transcribed recordings that the model was not "
                             "trained on, such as RUN/manifests/dev.csv: shows how far to trust its confidence")
    parser.add_argument("--keep", type=share, default=0.9, metavar="SHARE",
                        help="keep rows with at least this expected word accuracy (0.9)")
    parser.add_argument("--shard", type=_shard, default="1/1", metavar="I/N",
                        help="label only this part of the recordings, such as 3/16; slurm: this task's part of a job "
                             "array")
    add_model(parser)
    parser.add_argument("--readers", type=count, default=2, help="number of threads that decode audio (2)")
    parser.add_argument("--batch-seconds", type=above, metavar="S", help="audio in one batch, with padding")
    add_schemes(parser)
    add_search(parser)


def _shard(text: str) -> RecordingShard:
    from sbkit.infer.label_request import RecordingShard

    if text == "slurm":
        try:
            task, first, shards = (int(os.environ.get(name, "")) for name in _SLURM)
            step = int(os.environ.get(_SLURM_STEP, "1"))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"slurm: this is not a task of a job array: {', '.join(_SLURM)} aren't set; start it with "
                "sbatch --array=1-16") from None
        return RecordingShard((task - first) // step + 1, shards)
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match and 1 <= int(match[1]) <= int(match[2]):
        return RecordingShard(int(match[1]), int(match[2]))
    raise argparse.ArgumentTypeError(f"{text!r} is not a shard: write 1/16 to 16/16, or slurm")


def run(args: argparse.Namespace) -> int:
    require_language_model(args.lm)
    from sbkit.infer.label_request import LabelRequest
    from sbkit.infer.labelling import label

    return label(request_of(LabelRequest, args))
