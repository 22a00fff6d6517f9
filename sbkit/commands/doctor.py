"""``sbkit doctor``: report what this machine offers and what is in the way; with ``--gpu``, test its cards."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from sbkit.commands.options import above
from sbkit.errors import SbkitError


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--data", metavar="FOLDER", type=Path, help="a corpus, to measure how fast it is read")
    parser.add_argument("--run", metavar="RUN", type=Path, help="the output folder of a run to look at")
    parser.add_argument("--gpu", action="store_true",
                        help="test what works on this machine's cards and how fast, in ten minutes, and write a report")
    parser.add_argument("--rehearse", action="store_true", help="with --gpu: the same checks, scaled down, on the CPU")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="CHECK[,CHECK]",
                        help="with --gpu: only these checks")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), metavar="FILE",
                        help="with --gpu: the report's name without .md and .json (default: gpu-report)")
    parser.add_argument("--minutes", type=above, default=10.0, metavar="M", help="with --gpu: time limit (10)")


def run(args: argparse.Namespace) -> int:
    """Examine the machine or test its cards; exit code 1 if something is in the way or falls short."""
    alone = [name for name, given in (("--data", args.data), ("--run", args.run), ("--json", args.json)) if given]
    proving = [name for name, given in (("--rehearse", args.rehearse), ("--only", args.only)) if given]
    if (alone if args.gpu else proving):
        raise SbkitError(f"{(alone if args.gpu else proving)[0]} works only {'without' if args.gpu else 'with'} --gpu")
    return _prove(args) if args.gpu else _examine(args)


def _prove(args: argparse.Namespace) -> int:
    from sbkit.doctor.gpu.proof import GpuRequest, prove

    return prove(GpuRequest(rehearse=args.rehearse, out=args.out, only=args.only, minutes=args.minutes))


def _examine(args: argparse.Namespace) -> int:
    from sbkit.doctor import examination
    from sbkit.doctor.finding import Scope

    found = examination.examine(Scope(args.data, args.run))
    print(examination.as_json(found) if args.json else examination.as_table(found, shutil.get_terminal_size().columns))
    return 1 if examination.in_the_way(found) else 0
