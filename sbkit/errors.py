"""The one exception for errors that a user can fix: what is wrong, where, what to do; any error in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import islice

_SHOWN, _LISTED = 100, 16  # characters of a value, and names, in a message
_LINE = 600  # characters of another library's message
_OUT_OF_MEMORY = (
    "out of memory", "can't allocate memory", "Cannot allocate memory", "Failed to allocate memory", "std::bad_alloc",
    "not enough memory", "Memory allocation error", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


#: Control characters, which a terminal obeys, except line feeds and tabs.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_HALF_PAIR = re.compile(r"[\ud800-\udfff]")


def is_storable(text: str) -> bool:
    r"""Return whether a text has neither control characters, which a terminal obeys and no path can have, nor halves of
    surrogate pairs, which no file can hold. JSON may have both.

    >>> is_storable("a\tb"), is_storable("a\x1b]0;b")
    (True, False)
    """
    return not CONTROL.search(text) and not _HALF_PAIR.search(text)


def printable(text: str) -> str:
    r"""Escape control characters in a text that may have a stranger's words or names.

    >>> printable("a\x1b]0;b")
    'a\\x1b]0;b'
    """
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class SbkitError(Exception):
    """An error shown as one plain line without a traceback; the command exits with ``exit_code``.

    code : names its cause, for programs and tests, which never look at words; ``sbkit explain CODE`` tells more
    message : what is wrong, and where
    hint : what to do
    file, line, key, value : what the message is about, where there is one

    Names and values of strangers in it can't reach the terminal's controls.

    >>> error = SbkitError("missing-column", "train.tsv has no column 'path'", hint="is it a Common Voice release?")
    >>> str(error), error.code
    ("train.tsv has no column 'path'; is it a Common Voice release?", 'missing-column')
    """

    exit_code = 2
    #: What a line with it begins with on the screen.
    prefix = "error: "

    def __init__(self, code: str, message: str, *, hint: str | None = None, file: str | os.PathLike[str] | None = None,
                 line: int | None = None, key: str | None = None, value: object = None, exit_code: int | None = None):
        message, hint = printable(message), None if hint is None else printable(hint)
        super().__init__(message if hint is None else f"{message}; {hint}")
        self.code = code
        self.message = message
        self.hint = hint
        self.file = None if file is None else os.fspath(file)
        self.line = line
        self.key = key
        self.value = value
        if exit_code is not None:
            self.exit_code = exit_code

    @property
    def shown(self) -> str:
        """The line that ends a command: the error with its code."""
        return f"{self.prefix}{self} [{self.code}]"

    def as_json(self) -> dict[str, object]:
        """Its fields for programs; those that it has not are left out."""
        fields = {"code": self.code, "message": self.message, "hint": self.hint, "file": self.file, "line": self.line,
                  "key": self.key, "value": _json_value(self.value)}
        return {name: value for name, value in fields.items() if value is not None}

    def __reduce__(self) -> tuple[object, ...]:  # worker processes and ranks pickle it
        return _rebuild, (type(self), str(self)), self.__dict__


def explain(error: BaseException, explanation: SbkitError) -> None:
    """Attach to an error of Python's what a user reads instead, if it ends a script: who raised it may know more."""
    error.sbkit_explanation = explanation  # type: ignore[attr-defined]  # an exception takes any attribute


def explanation_of(error: BaseException) -> SbkitError | None:
    """Return what :func:`explain` attached."""
    return getattr(error, "sbkit_explanation", None)


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message, cut if it is long, or the name of its class if it has no message.

    >>> first_line(ValueError("no such file\nTraceback ..."))
    'no such file'
    """
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= _LINE else f"{line[:_LINE]}..."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch, ONNX Runtime or the system means that a device, or the CPU, had no memory left.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    """
    from_library = isinstance(error, (RuntimeError, OSError)) or type(error).__module__.startswith("onnxruntime")
    return isinstance(error, MemoryError) or (from_library and any(part in str(error) for part in _OUT_OF_MEMORY))


def shown(value: object) -> str:
    """Format a value that somebody else wrote for a message: in one line, shortened if it is long.

    >>> shown("a" * 10**6)[-5:]
    'aa...'
    """
    text = repr(value[:_SHOWN] if isinstance(value, (str, bytes, list)) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def shown_names(names: Iterable[str]) -> str:
    """List names that somebody else wrote in a message: the first of many, each shortened if it is long.

    >>> shown_names(["ID", "wav"])
    'ID, wav'
    """
    listed = [printable(name[:_SHOWN]) + ("..." if len(name) > _SHOWN else "")
              for name in islice(names, _LISTED + 1)]
    return ", ".join(listed[:_LISTED]) + (", ..." if len(listed) > _LISTED else "")


def summary(error: BaseException) -> str:
    r"""Return the class of an error, unless it is sbkit's, and the first line of its message.

    >>> summary(ValueError("no such file\nTraceback ..."))
    'ValueError: no such file'
    """
    kind, line = type(error).__name__, first_line(error)
    if not str(error).strip():
        return kind
    return line if isinstance(error, SbkitError) else f"{kind}: {line}"


def _json_value(value: object) -> object:
    """A value as JSON has it, if it is a number or a short text; otherwise as a message shows it."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str) and len(value) <= _SHOWN:
        return printable(value)
    return shown(value)


def _rebuild(cls: type[SbkitError], text: str) -> SbkitError:
    return cls.__new__(cls, text)  # a subclass may have other arguments
