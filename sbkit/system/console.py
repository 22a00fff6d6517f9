"""Terminal output and files: tables, progress bars, log filters, atomic writes, stored JSON."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import re
import secrets
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tqdm import tqdm

from sbkit.errors import SbkitError, explanation_of, printable
from sbkit.system import disk, untrusted

_logger = logging.getLogger(__name__)
LINE_SECONDS = 30.0  # between plain lines, outside of a terminal


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], indent: str = "") -> str:
    """Format a table: numbers aligned right, words left, control characters escaped.

    >>> print(table(["split", "rows"], [["train", 1200], ["dev", 80]]))
    split  rows
    -----  ----
    train  1200
    dev      80
    """
    cells = [[_cell(value) for value in row] for row in rows]
    columns = [[row[i] for row in cells] for i in range(len(headers))]
    widths = [max(map(len, [header, *column])) for header, column in zip(headers, columns, strict=True)]
    are_numbers = [bool(column) and all(_is_number(cell) for cell in column if cell) for column in columns]

    def line(values: Sequence[str]) -> str:
        parts = [value.rjust(width) if is_number else value.ljust(width)
                 for value, width, is_number in zip(values, widths, are_numbers, strict=True)]
        return (indent + "  ".join(parts)).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else printable(str(value))


def _is_number(cell: str) -> bool:
    """Return whether a cell is a number, such as -1,200.5, 12 % or 2.0x."""
    return cell.rstrip("%x").replace(",", "").replace(".", "", 1).lstrip("-").isdigit()


def time_span(seconds: float) -> str:
    """Format a time with two digits, in a readable unit.

    >>> time_span(0.2772), time_span(75), time_span(1200), time_span(27 * 3600)
    ('0.28 s', '75 s', '20 min', '27 h')
    """
    if seconds >= 1.5 * 3600:
        value, unit = seconds / 3600, "h"
    elif seconds >= 1.5 * 60:
        value, unit = seconds / 60, "min"
    else:
        value, unit = seconds, "s"
    return f"{value:,.0f} {unit}" if value >= 9.95 or not value else f"{max(value, 0.001):.2g} {unit}"


def counted(count: int, what: str) -> str:
    """Format a count with its noun: 1 error, 2 errors."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def progress(iterable: Iterable[Any] | None = None, *, what: str, total: int | None = None, unit: str = "it",
             show: bool = True) -> tqdm:
    """Show a progress bar on stderr; without a terminal it is a line every half minute, and one at the end."""
    return _Bar(iterable, desc=what, total=total, unit=unit, unit_scale=unit == "B", disable=not show,
                dynamic_ncols=True, file=sys.stderr, mininterval=0.2)


class _Bar(tqdm):
    """A bar that looks like training's (``StageDisplay``)."""

    _due = 0.0  # when the next line is, without a terminal

    def display(self, *args: Any, **kwargs: Any) -> None:  # as tqdm's
        is_closing = self.disable
        now = time.monotonic()
        self._due = self._due or now + LINE_SECONDS
        took = "took {elapsed}" if is_closing or not self.total else "{remaining} left"
        if self.fp.isatty():
            count = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}" if self.total else "{n_fmt}"
            self.bar_format = f"{{desc}} {count}, {took}, {{rate_fmt}}{{postfix}}"
            super().display(*args, **kwargs)
        elif is_closing or now >= self._due:
            self._due = now + LINE_SECONDS
            count = "{n_fmt}/{total_fmt} ({percentage:.0f} %)" if self.total else "{n_fmt}"
            self.bar_format = f"{{desc}}: {count}, {took}, {{rate_fmt}}"
            self.fp.write(f"{self}" if is_closing else f"{self}\n")


class LastingStream(io.FileIO):
    """An output of this process that never fails: once its terminal or reader is gone, its lines go to log.txt."""

    def __init__(self, fd: int, lost: bool = False):
        super().__init__(fd, "w", closefd=False)
        self.lost = lost
        self._line = b""  # the last line, until it ends

    def write(self, data: Any) -> int:  # whatever has bytes, as io's own
        """Write to the file, or keep the lines for the log."""
        if not self.lost:
            try:
                count = super().write(data)
                if count is not None:
                    return count
            except OSError:
                self.lost = True
                with contextlib.suppress(OSError):  # so that C code and Python's shutdown can write, too
                    silence(self.fileno())
        *lines, line = (self._line + bytes(data)).split(b"\n")
        self._line = line[line.rfind(b"\r", 0, -1) + 1:][-_LONGEST_LINE:]  # of a progress bar, only its latest state
        if not getattr(_logging, "here", False):
            texts = (_CONTROL.sub("", line.decode("utf-8", "replace")).rstrip() for line in lines)
            LogFile.catch_up(*filter(None, texts))
        return len(data)


_CONTROL = re.compile(r"^.*\r(?=.)|\x1b\[[0-9;?]*[A-Za-z]")
_LONGEST_LINE = 1 << 16
_unwritten: deque[str] = deque(maxlen=10_000)  # bounded, because a script may have no log to write them to
_logging = threading.local()


def silence(fd: int) -> None:
    """Redirect a file descriptor to the null device."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != fd:
        os.dup2(nowhere, fd)
        os.close(nowhere)


def open_missing_streams() -> None:
    """Open standard streams that were closed at the start (``2>&-``), or the next file would get their number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            silence(fd)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _lasting(fd, "utf-8", "backslashreplace", lost=True))


def outlast_terminal() -> None:
    """Let this process continue if its terminal, or the reader of its output, is gone."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            with contextlib.suppress(OSError):
                stream.flush()
            setattr(sys, name, _lasting(fd, stream.encoding, stream.errors))


def _lasting(fd: int, encoding: str, errors: str, lost: bool = False) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(LastingStream(fd, lost)), encoding, errors, line_buffering=True)


def write_now(text: str) -> None:
    """Write to stderr from a thread that must neither wait nor fail."""
    try:
        if not _nobody_reads_stderr():
            os.write(2, text.encode())
            return
    except OSError:
        pass
    _unwritten.append(text.strip())


def write_error(text: str) -> None:
    """Write the error that ends a command to stderr, and to the log of its run."""
    print(text, file=sys.stderr)
    if not _nobody_reads_stderr():  # otherwise the log has it already
        LogFile.catch_up(text)


Explain = Callable[[BaseException], SbkitError | None]


class ScriptErrors:
    """Ends a script of a user's own, as ``sys.excepthook``: in an error's one line, with the script's line before it.

    explain : returns the error to show for one of another library; None: there is no better one
    earlier : shows all errors that aren't sbkit's, with their traceback
    """

    def __init__(self, explain: Explain, earlier: Callable[..., object]):
        self.explain, self.earlier = explain, earlier

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown = explanation_of(error) or self.explain(error) or error
        if not isinstance(shown, SbkitError) or shown.__cause__ is not None:  # which may say more
            self.earlier(kind, shown, trace)
            return
        rank = os.environ.get("RANK", "0")
        prefix = f"rank {rank}: " if rank != "0" else ""  # another's error may be its own
        script = getattr(sys.modules["__main__"], "__file__", None)
        lines = [number for frame, number in traceback.walk_tb(trace) if frame.f_code.co_filename == script]
        place = f"{script}:{lines[-1]}: " if lines else ""
        write_error(f"{prefix}{place}{shown.shown}")


def end_scripts_in_one_line(explain: Explain = lambda error: None) -> None:
    """Let errors end a script as ``ScriptErrors`` says, as they end commands."""
    if not isinstance(sys.excepthook, ScriptErrors):
        sys.excepthook = ScriptErrors(explain, sys.excepthook)


def _nobody_reads_stderr() -> bool:
    return getattr(getattr(getattr(sys.stderr, "buffer", None), "raw", None), "lost", False)


class TerminalHandler(logging.StreamHandler):  # type: ignore[type-arg]  # has no arguments before Python 3.11
    """A log handler for the terminal that doesn't break progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; if the terminal is gone, the log has it already."""
        _logging.here = True
        try:
            tqdm.write(printable(self.format(record)), file=self.stream)
            self.flush()
        except Exception:
            self.handleError(record)
        finally:
            _logging.here = False


def log_messages() -> None:
    """Show log messages on stderr, as ``TerminalFilter`` says.

    Called before a library does so, with the logger's name in front; what a library tells by itself isn't told twice.
    """
    handler = logging.StreamHandler()
    handler.addFilter(lambda told: told.name == "root" or not logging.getLogger(told.name.partition(".")[0]).handlers)
    handler.addFilter(TerminalFilter())
    logging.basicConfig(format="%(message)s", handlers=[handler])


class TerminalFilter(logging.Filter):
    """Filter for the terminal: all warnings, but only sbkit's info; libraries' info goes to log.txt."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.name.startswith("sbkit")


class LogFile(logging.FileHandler):
    """Handler of log.txt. Lines lost on a full or broken disk are reported once, without a traceback for each."""

    _warned = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, and before it the lines that the terminal could not show."""
        self._catch_up()
        super().emit(record)

    def _catch_up(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                line = _unwritten.popleft()
                super().emit(logging.LogRecord("output", logging.INFO, __file__, 0, line, None, None))

    @classmethod
    def catch_up(cls, *lines: str) -> None:
        """Write lines that come from no logger, and those that the terminal could not show, if there is a log file.

        If another thread holds the handler's lock, they are written before the next record: waiting could deadlock,
        because that thread may be writing to this stream.
        """
        _unwritten.extend(lines)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, cls) and handler.lock and handler.lock.acquire(blocking=False):
                try:
                    handler._catch_up()
                finally:
                    handler.lock.release()

    def handleError(self, record: logging.LogRecord) -> None:
        _, error, _ = sys.exc_info()
        failure = (disk.disk_error(error) or error) if error else None
        if not isinstance(failure, OSError):
            super().handleError(record)
        elif not self._warned:
            self._warned = True
            # Not to sys.stderr, whose writer may be waiting for this record.
            write_now(f"warning: {disk.explain(failure, self.baseFilename)}; some of its lines are lost\n")


@contextlib.contextmanager
def logging_disabled(level: int) -> Iterator[None]:
    """Disable logging of this level and below inside this context."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Write to a temporary file, sync, rename: ``path`` has the old or the new content, even after a power cut."""
    path = Path(path)
    binary = "b" in mode
    with disk.disk_errors_as_user_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = _new_file_beside(path)
        try:
            with open(handle, mode, encoding=None if binary else "utf-8", newline=None if binary else "") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
        disk.sync_folder(path.parent)


_PARTIAL = ".partial"
_DAY = 24 * 3600.0


def _new_file_beside(path: Path) -> tuple[int, Path]:
    """Create a hidden file in the folder of ``path``; return its descriptor, open to read and write, and its path.

    Not by ``tempfile``, whose files only their owner may read. The permissions are those that the kernel gives by the
    umask: to read the umask is to set it, also for files that other threads are making. Its lock tells
    ``remove_partials`` that it is being written.
    """
    while True:
        name = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
        try:
            handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # removed by another process before it was locked


def remove_partials(folder: Path) -> None:
    """Remove the temporary files of ``atomic_write`` in a folder whose writers were killed."""
    for path in folder.glob(f".*{_PARTIAL}"):
        with contextlib.suppress(OSError), untrusted.open_regular(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # it is being written
            except OSError:  # no locks on this file system
                if time.time() - path.stat().st_mtime < _DAY:
                    continue
            path.unlink()
            _logger.warning("Removed %s, left by a process that was killed", path)


def stored_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object that sbkit wrote; return an empty one if the file is missing or damaged."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
