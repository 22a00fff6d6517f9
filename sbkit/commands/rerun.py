"""``sbkit rerun``: compute a non-finite step again, layer by layer."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import RUNS_CODE, require_run


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = RUNS_CODE
    parser.add_argument("folder", metavar="FOLDER", type=Path,
                        help="RUN/bad_batches/step-N-rank-R, or RUN for the newest")
    parser.add_argument("--device")


def run(args: argparse.Namespace) -> int:
    require_run(args.folder)
    from sbkit.runs import restore
    from sbkit.score.weights import LAST, ChosenWeights
    from sbkit.train.bad_batch import replay
    from sbkit.train.bad_batch.files import find_saved

    bad_batch, saved = find_saved(args.folder)
    brain = restore.build(restore.read_run(bad_batch.parent.parent), args.device, precision=saved["precision"])
    if brain.checkpointer.list_checkpoints():  # overwritten by the bad batch's weights, if they were saved
        restore.take_weights(brain, ChosenWeights(LAST))
    print(replay(brain, bad_batch))
    return 0
