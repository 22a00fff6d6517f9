"""Standard input, where it is to be read: a program's output or a file."""

from __future__ import annotations

import sys
from typing import TextIO

from sbkit.errors import SbkitError


def standard_input(what: str, hint: str) -> TextIO:
    """Return standard input; raises if it is closed, or a terminal in which nobody would know that they should type.

    Arguments
    ---------
    what : is read from it, such as ``audio``
    hint : a command that gives it
    """
    if sys.stdin is None:
        raise SbkitError(f"- reads {what} from standard input, but standard input is closed", hint=hint)
    if sys.stdin.isatty():
        raise SbkitError(f"- reads {what} from standard input, but that is a terminal", hint=hint)
    return sys.stdin
