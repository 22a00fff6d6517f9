"""``sbkit enhance``: remove noise from recordings with an exported enhancer."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import add_model, add_schemes, request_of


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="an enhancer's folder that sbkit export made")
    parser.add_argument("files", metavar="FILES", nargs="+",
                        help="audio files of any length and rate, folders, a manifest.csv, or - for stdin")
    parser.add_argument("--to", metavar="FOLDER", type=Path, required=True,
                        help="write NAME.wav for each recording, at the model's rate, skipping those that exist")
    parser.add_argument("--overwrite", action="store_true", help="redo recordings whose files exist")
    add_schemes(parser)
    add_model(parser, "onnx")


def run(args: argparse.Namespace) -> int:
    from sbkit.infer.enhancing import EnhanceRequest, enhance
    from sbkit.train.signals import end_by_signals

    with end_by_signals():
        return enhance(request_of(EnhanceRequest, args))
