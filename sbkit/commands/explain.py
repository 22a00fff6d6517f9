"""``sbkit explain [CODE]``: explain the code of an error or a finding: what it means, and what to do."""

from __future__ import annotations

import argparse
import json

from sbkit import explanations
from sbkit.system.console import table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", help="as it stands in brackets after a message; without it, all are listed")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    if args.code is None:
        everything = list(explanations.all_explanations().values())
        print(_as_json(everything) if args.json else _as_table(everything))
        return 0
    explanation = explanations.explanation(args.code.strip("[]"))
    print(json.dumps(explanation.as_dict(), indent=2) if args.json else explanation.text)
    return 0


def _as_json(everything: list[explanations.Explanation]) -> str:
    return json.dumps([explanation.as_dict() for explanation in everything], indent=2)


def _as_table(everything: list[explanations.Explanation]) -> str:
    rows = [[explanation.code, " ".join(explanation.what.split())] for explanation in everything]
    return table(["code", "meaning"], rows)
