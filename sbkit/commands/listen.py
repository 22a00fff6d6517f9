"""``sbkit listen``: transcribe live speech from the microphone or standard input."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import add_model, add_search, count, request_of, require_language_model


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path,
                        help="the folder that sbkit export made of a recogniser; one that was trained in chunks costs "
                             "least, any other decodes each line again and again")
    parser.add_argument("source", metavar="-", nargs="?",
                        help="16-bit little-endian PCM of one channel from stdin (default: the microphone)")
    parser.add_argument("--rate", type=count, metavar="HERTZ", help="samples per second (default: the model's)")
    parser.add_argument("--chunk", type=count, metavar="MS", help="one of a streaming model's chunk sizes, in "
                        "milliseconds: a smaller one is faster, a larger one makes fewer errors (default: the middle "
                        "one)")
    parser.add_argument("--json", action="store_true", help="write one JSON object per line: partial, final, end")
    parser.add_argument("--microphone", metavar="NAME", help="its number or a part of its name, as "
                        "python -m sounddevice lists them (default: the system's)")
    add_model(parser)
    add_search(parser)


def run(args: argparse.Namespace) -> int:
    require_language_model(args.lm)
    from sbkit.infer.listening import ListenRequest, listen

    return listen(request_of(ListenRequest, args))
