"""``sbkit new FOLDER``: write a starter folder: a task's recipes, train.py and a README."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path,
                        help="folder to create; existing files are never overwritten")
    parser.add_argument("--task", default="ctc",
                        help="task whose recipes to write, such as finetune for a pretrained encoder (default: ctc); "
                             "mine writes a template for your own task")


def run(args: argparse.Namespace) -> int:
    from sbkit.recipe import starter

    for place in starter.write(args.folder, args.task):
        print(args.folder / place)
    print(f"\ncd {shlex.quote(str(args.folder))}; sbkit check hparams/{args.task}.yaml      (README.md has the rest)")
    return 0
