"""``sbkit transcribe``: what is said in recordings, by an exported bundle."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import above, add_schemes, add_search, count


def add(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder that sbkit export made")
    parser.add_argument("files", metavar="FILES", nargs="+", help="files, folders, a manifest.csv, - for stdin")
    parser.add_argument("--output", metavar="FOLDER", type=Path,
                        help="write a file for each recording, and skip what is there already")
    parser.add_argument("--format", dest="formats", default=["txt"], type=lambda text: text.split(","),
                        metavar="A,B", help="of txt,json,srt,vtt,ctm (default: txt)")
    parser.add_argument("--model", default="auto", help="onnx, int8 (on a CPU) or torch "
                        "(default: the first that is there)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=count, help="of the model on the CPU (default: all it may use)")
    parser.add_argument("--readers", type=count, default=2, help="threads that decode audio (2)")
    parser.add_argument("--batch-seconds", type=above, metavar="S", help="audio in one batch, padding counted")
    parser.add_argument("--chunk-seconds", type=above, metavar="S", help="longest that the model hears at once")
    parser.add_argument("--references", metavar="FILE", help="manifest.csv or lines name<TAB>text: show the WER")
    parser.add_argument("--overwrite", action="store_true", help="do again what is in the folder")
    add_schemes(parser)
    add_search(parser)


def run(args: argparse.Namespace) -> int:
    """Transcribe them; the exit code."""
    from sbkit.infer.transcription import TranscribeRequest, transcribe

    wanted = {name: getattr(args, name) for name in TranscribeRequest.__dataclass_fields__}
    return transcribe(TranscribeRequest(**wanted))
