"""``sbkit doctor``: report what this machine offers, and what keeps sbkit from running well."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from sbkit.errors import SbkitError

FORMER = {"data": "data-folder"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--data_folder", "--data", dest="data", metavar="FOLDER", type=Path,
                        help="a corpus, to measure how fast it is read")
    parser.add_argument("--run", metavar="RUN", type=Path, help="the output folder of a run to check")
    parser.add_argument("--gpu", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # until the next release


def run(args: argparse.Namespace) -> int:
    """Examine the machine; exit code 1 if something is in the way."""
    if args.gpu is not None:
        raise SbkitError("sbkit doctor --gpu is now a tool of a checkout",
                         hint=" ".join(["run there: make gpu, or python -m tools.gpu", *args.gpu]))
    from sbkit.doctor import examination

    found = examination.examine(args.data, args.run)
    print(examination.as_json(found) if args.json else examination.as_table(found, shutil.get_terminal_size().columns))
    return 1 if examination.in_the_way(found) else 0
