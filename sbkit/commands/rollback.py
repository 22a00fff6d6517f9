"""``sbkit rollback``: put the bundle back that improve replaced; again puts the improved one back."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path,
                        help="the bundle that sbkit improve published; it changes places with the one before, which is "
                             "kept in BUNDLE.previous, and a running server takes that")


def run(args: argparse.Namespace) -> int:
    from sbkit.data import publish
    from sbkit.errors import SbkitError
    from sbkit.export import layout

    bundle = args.bundle.resolve()
    previous = publish.previous(args.bundle)
    publish.clean_up(bundle, layout.FOLDER)
    if not previous.exists():
        raise SbkitError("no-previous-bundle", f"{previous} does not exist, so there is nothing to go back to",
                         hint="sbkit improve --to BUNDLE keeps the bundle that it replaces there", file=previous)
    layout.read(previous)
    is_exchanged = bundle.exists()
    if is_exchanged:
        layout.read(bundle)  # raises if it isn't a bundle
    publish.publish(previous, bundle, layout.FOLDER, force=True, keep=previous)
    message = f"{args.bundle} is the bundle that it was before"
    if is_exchanged:
        message += f"; the other one is in {previous}, and the same command brings it back"
    print(message)
    return 0
