"""``sbkit doctor``: report what this machine offers, and what keeps sbkit from running well."""

from __future__ import annotations

import argparse
import shutil


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Examine the machine; exit code 1 if something is in the way."""
    from sbkit import doctor

    found = doctor.examine()
    print(doctor.as_json(found) if args.json else doctor.as_table(found, shutil.get_terminal_size().columns))
    return 1 if any(each.in_the_way for each in found) else 0
