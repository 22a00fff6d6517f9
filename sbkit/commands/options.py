"""Options that several commands have, and values that they take."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import TypeVar

_Number = TypeVar("_Number", int, float)

RUNS_CODE = "The recipe in a run's folder is code, which this imports and calls: name only runs that you trust."


def add_schemes(parser: argparse.ArgumentParser) -> None:
    """Add ``--schemes``."""
    parser.add_argument("--schemes", type=lambda text: text.split(","), default=[], metavar="A,B",
                        help="kinds of URL that may be opened among recordings, such as https,s3 (default: none)")


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search with a language model and hot words."""
    parser.add_argument("--lm", metavar="FILE", help="a language model: ARPA, or KenLM's binary")
    parser.add_argument("--lm-weight", type=float, metavar="W", help="what its scores are multiplied by")
    parser.add_argument("--word-score", type=float, metavar="W", help="what each word adds to a transcript's score")
    parser.add_argument("--beam", type=int, help="transcripts followed at a time")
    parser.add_argument("--hot-word", dest="hot_words", action="append", default=[], metavar="PHRASE[=BOOST]",
                        help="a phrase to expect (again for more; @FILE has one a line)")


def count(text: str) -> int:
    """A whole number above 0."""
    return _above_zero(text, int, "whole number")


def above(text: str) -> float:
    """A number above 0."""
    return _above_zero(text, float, "number")


def _above_zero(text: str, kind: Callable[[str], _Number], what: str) -> _Number:
    with contextlib.suppress(ValueError):
        if (value := kind(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no {what} above 0")
