"""``sbkit replay``: a step that was not finite, run again layer by layer."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import RUNS_CODE


def add(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.epilog = RUNS_CODE
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="RUN/culprits/step-N-rank-R, or RUN for the newest")
    parser.add_argument("--device")


def run(args: argparse.Namespace) -> int:
    """Run it once more and print what each layer gave; the exit code."""
    from sbkit.runs import restore
    from sbkit.train.diagnose import replay as culprits

    culprit = culprits.find(args.folder)
    saved = culprits.read(culprit)
    brain = restore.build(restore.read_run(culprit.parent.parent), args.device, precision=saved["precision"])
    if brain.checkpointer.list_checkpoints():  # the culprit's own weights, where they were kept, come over these
        restore.take_weights(brain, restore.LAST)
    print(culprits.replay(brain, culprit))
    return 0
