"""``sbkit transcribe``: transcribe recordings with an exported bundle."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import (
    above,
    add_model,
    add_schemes,
    add_search,
    add_vad,
    count,
    request_of,
    require_language_model,
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder that sbkit export made")
    parser.add_argument("files", metavar="FILES", nargs="+",
                        help="audio files, folders, a manifest.csv, or - for stdin")
    parser.add_argument("--to", dest="output", metavar="FOLDER", type=Path,
                        help="write a file for each recording, skipping those that exist")
    parser.add_argument("--format", dest="formats", default=["txt"], type=lambda text: text.split(","),
                        metavar="A,B", help="any of txt,json,srt,vtt,ctm (default: txt)")
    parser.add_argument("--json", dest="formats", action="store_const", const=["json"],
                        help="the same as --format json; of several recordings a line each")
    add_model(parser)
    parser.add_argument("--readers", type=count, default=2, help="number of threads that decode audio (2)")
    parser.add_argument("--batch-seconds", type=above, metavar="S", help="audio in one batch, with padding")
    parser.add_argument("--chunk-seconds", type=above, metavar="S", help="longest audio the model gets at once")
    parser.add_argument("--references", metavar="FILE", help="CSV, TSV or lines of name<TAB>text; prints the WER")
    parser.add_argument("--overwrite", action="store_true", help="redo recordings whose files exist")
    add_schemes(parser)
    add_vad(parser)
    add_search(parser)


def run(args: argparse.Namespace) -> int:
    require_language_model(args.lm)
    from sbkit.infer.transcription import TranscribeRequest, transcribe

    return transcribe(request_of(TranscribeRequest, args))
