"""``sbkit speak``: speak a text with an exported voice."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import add_model, request_of


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="a voice's folder that sbkit export made")
    parser.add_argument("text", metavar="TEXT", nargs="?", help="what to say; - reads it from stdin")
    parser.add_argument("--file", type=Path, help="speak this UTF-8 text file, of any length")
    parser.add_argument("--to", required=True, metavar="FILE",
                        help="out.wav, .flac, .mp3, .opus or .ogg; - writes 16-bit WAV to stdout")
    parser.add_argument("--voice", metavar="NAME", help="one of the bundle's voices (default: its first)")
    parser.add_argument("--speed", type=float, default=1.0, help="0.25 to 4 (1)")
    parser.add_argument("--skip-unknown", action="store_true",
                        help="leave out characters that the voice doesn't know, instead of refusing the text")
    add_model(parser, "onnx")


def run(args: argparse.Namespace) -> int:
    from sbkit.infer.speaking import SpeakRequest, speak
    from sbkit.train.signals import end_by_signals

    with end_by_signals():
        return speak(request_of(SpeakRequest, args))
