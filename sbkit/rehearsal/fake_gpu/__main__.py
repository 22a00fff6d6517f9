"""Runs a command on fake GPUs: ``python -m sbkit.rehearsal.fake_gpu --cards 2xH100 -- python -m pytest -m gpu``."""

from __future__ import annotations

import argparse
import os

from sbkit.errors import SbkitError
from sbkit.rehearsal.cards import parse_cards
from sbkit.rehearsal.fake_gpu import environment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sbkit.rehearsal.fake_gpu", description="Run a command on GPUs "
                                     "that compute nothing, on a machine without any.")
    parser.add_argument("--cards", default="H100", help="such as 2xH100 (default: %(default)s)")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    args = parser.parse_args()
    try:
        count, card = parse_cards(args.cards)
        variables = environment(card, count)
    except SbkitError as error:
        parser.error(error.shown.removeprefix(error.prefix))
    os.execvpe(args.command[0], args.command, variables)


if __name__ == "__main__":
    main()
