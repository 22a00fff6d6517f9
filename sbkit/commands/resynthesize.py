"""``sbkit resynthesize``: turn codes back into audio files with an exported codec."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import add_model, request_of


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="a codec's folder that sbkit export made")
    parser.add_argument("folder", metavar="DIR", type=Path, help="codes of this codec, as sbkit tokenize made them")
    parser.add_argument("--to", metavar="OUT", type=Path, required=True, help="the folder of audio files to create")
    parser.add_argument("--format", choices=["wav", "flac"], default="wav", help="format of the audio files (wav)")
    parser.add_argument("--force", action="store_true", help="replace the folder if it exists")
    add_model(parser, "onnx")


def run(args: argparse.Namespace) -> int:
    from sbkit.infer.resynthesis import ResynthesizeRequest, resynthesize
    from sbkit.train.signals import end_by_signals

    with end_by_signals():
        return resynthesize(request_of(ResynthesizeRequest, args))
