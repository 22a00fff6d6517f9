"""``sbkit push``: put a bundle on the Hugging Face Hub."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder that sbkit export made")
    parser.add_argument("repository", metavar="OWNER/NAME", help="the model's name on the Hub; created if new")
    parser.add_argument("--private", action="store_true", help="create it as a private repository")


def run(args: argparse.Namespace) -> int:
    from sbkit.export.push import push

    print(push(args.bundle, args.repository, args.private))
    return 0
