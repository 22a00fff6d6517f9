"""``sbkit explain [CODE]``: explain the code of an error or a finding: what it means, and what to do."""

from __future__ import annotations

import argparse

from sbkit import explanations
from sbkit.commands.options import add_json, print_json
from sbkit.system.console import table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", help="as it stands in brackets after a message; without it, all are listed")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.code is None:
        everything = list(explanations.all_explanations().values())
        if args.json:
            print_json([explanation.as_dict() for explanation in everything])
        else:
            print(_as_table(everything))
        return 0
    explanation = explanations.explanation(args.code.strip("[]"))
    if args.json:
        print_json(explanation.as_dict())
    else:
        print(explanation.text)
    return 0


def _as_table(everything: list[explanations.Explanation]) -> str:
    rows = [[explanation.code, _first_sentence(explanation.what)] for explanation in everything]
    return table(["code", "meaning"], rows)


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].removesuffix(".")
