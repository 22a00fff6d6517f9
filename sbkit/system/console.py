"""Terminal output and files: tables, progress bars, log filters, atomic writes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from sbkit.system import disk


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], indent: str = "") -> str:
    """Format a table: numbers aligned right, words left.

    >>> print(table(["split", "rows"], [["train", 1200], ["dev", 80]]))
    split  rows
    -----  ----
    train  1200
    dev      80
    """
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max([len(h), *(len(row[i]) for row in cells)]) for i, h in enumerate(headers)]
    numeric = [
        bool(cells) and all(_is_number(row[i]) for row in cells if row[i]) for i in range(len(headers))
    ]

    def line(values: Sequence[str]) -> str:
        parts = [v.rjust(w) if n else v.ljust(w) for v, w, n in zip(values, widths, numeric, strict=True)]
        return (indent + "  ".join(parts)).rstrip()

    return "\n".join([line(headers), line(["-" * w for w in widths]), *map(line, cells)])


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _is_number(text: str) -> bool:
    return text.rstrip("%x").replace(",", "").replace(".", "", 1).lstrip("-").isdigit()


def progress(iterable: Iterable[Any] | None = None, *, what: str, total: int | None = None, unit: str = "it",
             show: bool = True) -> tqdm:
    """Show a progress bar on stderr; without a terminal only one line is printed at the end."""
    return tqdm(
        iterable, desc=what, total=total, unit=unit, disable=not show, dynamic_ncols=True, file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 10.0, leave=True,
    )


class ForPeople(logging.Filter):
    """Filter for the terminal: all warnings, but only sbkit's own info; libraries' info goes to log.txt."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the terminal shows a record."""
        return record.levelno >= logging.WARNING or record.name.startswith("sbkit")


class LogFile(logging.FileHandler):
    """Handler of log.txt. A full disk loses lines, which is reported once rather than with a traceback for each."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Handle a failed ``emit``."""
        error = sys.exc_info()[1]
        refused = disk.refusal(error) if error else None
        if not refused:
            super().handleError(record)
        elif not self._told:
            self._told = True
            print(f"warning: {disk.explain(refused, self.baseFilename)}; some of its lines are lost", file=sys.stderr)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Write to a temporary file, sync, rename: ``path`` has the old or the new content, even after a power cut."""
    path = Path(path)
    binary = "b" in mode
    with disk.told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, mode, encoding=None if binary else "utf-8", newline=None if binary else "") as out:
                yield out
                out.flush()
                os.fchmod(out.fileno(), 0o666 & ~_umask())
                os.fsync(out.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
        disk.sync_folder(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
