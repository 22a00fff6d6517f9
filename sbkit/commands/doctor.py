"""``sbkit doctor``: report what this machine offers, and what keeps sbkit from running well."""

from __future__ import annotations

import argparse
import shutil

from sbkit.commands.options import add_json


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Examine the machine; exit code 1 if there is an error."""
    from sbkit import doctor

    findings = doctor.examine()
    print(doctor.as_json(findings) if args.json else doctor.as_table(findings, shutil.get_terminal_size().columns))
    return 1 if any(finding.is_error for finding in findings) else 0
