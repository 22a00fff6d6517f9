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

    bundle, previous = args.bundle.resolve(), publish.previous(args.bundle)
    publish.clean_up(bundle, layout.FOLDER)
    if not previous.exists():
        raise SbkitError(f"there is no {previous}", hint="sbkit improve --to BUNDLE keeps there what it replaces")
    layout.read(previous)
    exchanged = bundle.exists()
    if exchanged:
        layout.read(bundle)  # what is no bundle isn't put away as one
    publish.publish(previous, bundle, layout.FOLDER, force=True, keep=previous)
    print(f"{args.bundle} is the bundle that it was before" + (
        f"; the other one is in {previous}, and the same command brings it back" if exchanged else ""))
    return 0
