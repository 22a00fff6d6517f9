"""``sbkit tokenize``: turn a corpus into codes with an exported codec."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import add_model, add_schemes, count, request_of


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="a codec's folder that sbkit export made")
    parser.add_argument("corpus", metavar="CORPUS", help="any value of a recipe's data_folder: a Common Voice "
                        "folder or archive, a folder of lists or of recordings, a Hugging Face id; or one list")
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="folder that gets codes for each split")
    parser.add_argument("--split", dest="splits", action="append", default=[], metavar="NAME",
                        help="a split by its name in the corpus (repeatable; default: train, dev and test)")
    parser.add_argument("--language", help="language of a Common Voice release that has several")
    parser.add_argument("--force", action="store_true", help="replace splits that exist")
    add_model(parser, "onnx")
    parser.add_argument("--readers", type=count, default=2, help="number of threads that decode audio (2)")
    add_schemes(parser)


def run(args: argparse.Namespace) -> int:
    from sbkit.export import layout

    layout.read(args.bundle)  # refused before torch is imported
    from sbkit.infer.tokenizing import TokenizeRequest, tokenize
    from sbkit.train.signals import end_by_signals

    with end_by_signals():
        return tokenize(request_of(TokenizeRequest, args))
