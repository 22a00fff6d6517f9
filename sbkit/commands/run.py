"""``sbkit run``: run an exported model that outputs tensors, such as speaker embeddings, on recordings."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import add_model, add_schemes, request_of, several_of

FORMATS = "npz", "wav", "json"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder that sbkit export made")
    parser.add_argument("files", metavar="FILES", nargs="+",
                        help="audio files, folders, a manifest.csv, or - for stdin")
    parser.add_argument("--to", dest="output", metavar="FOLDER", type=Path,
                        help="write files for each recording (default: print a line of JSON for each)")
    parser.add_argument("--format", dest="formats", default=["npz"], type=several_of(*FORMATS), metavar="A,B",
                        help=f"formats of these files, any of {','.join(FORMATS)}; wav is the first output (npz)")
    add_model(parser)
    add_schemes(parser)


def run(args: argparse.Namespace) -> int:
    from sbkit.infer.running import RunRequest, run

    return run(request_of(RunRequest, args))
