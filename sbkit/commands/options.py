"""Options and argument types that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sbkit.errors import SbkitError
from sbkit.score.chunk_size import WHOLE
from sbkit.score.weights import AVERAGES, Average, Mean, average_of
from sbkit.system.schema import NOT_NEGATIVE, POSITIVE, SHARE, Number

_Number = TypeVar("_Number", int, float)
T = TypeVar("T")

RUNS_CODE = ("The recipe in a run's folder is code, which this command imports and calls: use only "
             "runs that you trust.")
RUNS_SCRIPT = f"{RUNS_CODE} Of a run that a SpeechBrain script has trained, it runs the script, without training."


def request_of(kind: type[T], args: argparse.Namespace, **more: object) -> T:
    """Build a dataclass from the arguments that have the names of its fields, and from more values."""
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # a dataclass, as documented
    return kind(**{name: value for name, value in vars(args).items() if name in fields}, **more)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, with which a command prints nothing else on stdout."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def print_json(values: object) -> None:
    """Print what ``--json`` asks for."""
    print(json.dumps(values, indent=1, ensure_ascii=False, default=str))


def add_schemes(parser: argparse.ArgumentParser) -> None:
    """Add ``--schemes``."""
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=[], metavar="A,B",
                        help="URL schemes that recordings may have, such as https,s3 (default: none)")


def add_model(parser: argparse.ArgumentParser, formats: str = "onnx, int8 (on a CPU)") -> None:
    """Add ``--model``, ``--device`` and ``--threads``."""
    parser.add_argument("--model", default="auto", help=f"{formats} or torch, which can run any code of whoever "
                        "made the bundle (default: the first in the bundle except torch)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=count, help="CPU threads of a model (default: OMP_NUM_THREADS, or all cores)")


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search with a language model and hot words."""
    parser.add_argument("--lm", metavar="FILE", help="a language model: an ARPA file")
    parser.add_argument("--lm-weight", type=float, metavar="W", help="factor for the language model's scores")
    parser.add_argument("--word-score", type=float, metavar="W", help="score added for each word of a transcript")
    parser.add_argument("--beam", type=int, help="number of hypotheses kept at each step")
    parser.add_argument("--hot-word", dest="hot_words", action="append", default=[], metavar="PHRASE[=BOOST]",
                        help="a phrase to expect (repeatable; @FILE has one per line)")


def add_vad(parser: argparse.ArgumentParser) -> None:
    """Add ``--vad``."""
    parser.add_argument("--vad", action="store_true", help="transcribe recordings only where silero-vad detects "
                        "speech, so that no words are hallucinated on non-speech")


def add_average(parser: argparse.ArgumentParser, does: str) -> None:
    """Add ``--average``, whose help says what the command does with it."""
    others = "".join(f", or {name}-of-N: the {name}" for name in AVERAGES if name != Mean.name)
    parser.add_argument("--average", type=_average, default=Mean(), metavar="N", help=f"{does}{others}")


def _average(text: str) -> Average:
    try:
        return average_of(text)
    except SbkitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def require_run(folder: Path) -> None:
    """Refuse a run that isn't there, before torch is imported, which takes seconds."""
    if not folder.exists():
        raise SbkitError("no-such-path", f"{folder} does not exist", hint="name the output_folder of a run",
                         file=folder)


def require_language_model(path: str | None) -> None:
    """Refuse a file of ``--lm`` that isn't there, before a model is loaded, which takes seconds."""
    from sbkit.decode import arpa

    if path is not None:
        arpa.check_exists(path)


def chunk_sizes(text: str) -> tuple[int | None, ...]:
    """Parse milliseconds, or ``whole`` (None), with commas between them."""
    sizes: list[int | None] = []
    for part in text.split(","):
        try:
            sizes.append(None if part == WHOLE else count(part))
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(
                f"{part!r} is neither milliseconds nor {WHOLE}: write 320,{WHOLE}") from None
    if len(set(sizes)) < len(sizes):
        raise argparse.ArgumentTypeError(f"{text!r} names a size twice")
    return tuple(sizes)


class UnknownChoice(argparse.ArgumentTypeError):
    """Raised for a word that isn't one of ``choices``."""

    def __init__(self, word: str, choices: Sequence[str]):
        super().__init__(f"invalid choice: {word!r} (choose from {', '.join(choices)})")
        self.word, self.choices = word, choices


def several_of(*known: str) -> Callable[[str], list[str]]:
    """Make a parser of some of these names, with commas between them."""
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise UnknownChoice(name, known)
        return names

    return parse


def number_parser(kind: Callable[[str], _Number], allowed: Number, what: str = "") -> Callable[[str], _Number]:
    """Make a parser of the allowed numbers; ``what`` describes them."""
    def parse(text: str) -> _Number:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if value in allowed:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what or allowed}")

    return parse


count = number_parser(int, Number(0, whole=True, above=True))
above, share = number_parser(float, POSITIVE), number_parser(float, SHARE)
not_negative = number_parser(float, NOT_NEGATIVE)
price = number_parser(float, Number(0, sys.float_info.max), "the price of a device per hour, such as 2.5")
