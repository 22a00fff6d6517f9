"""``sbkit new FOLDER``: a folder to start in, with a task's recipes and a page that tells how to go on."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="nothing that is there is written over")
    parser.add_argument("--task", default="ctc", help="whose recipes to write (default: ctc)")


def run(args: argparse.Namespace) -> int:
    """Write it, and say what to do next; the exit code."""
    from sbkit.recipe import starter

    for place in starter.write(args.folder, args.task):
        print(args.folder / place)
    print(f"\ncd {shlex.quote(str(args.folder))}; sbkit check hparams/{args.task}.yaml      (README.md tells the rest)")
    return 0
