"""An append-only file that a resumed run continues where its checkpoint stood: no line lost, none twice."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sbkit.system import disk
from sbkit.system.console import atomic_write

logger = logging.getLogger(__name__)

_MOST_WAITING = 100_000  # lines; some tens of megabytes


class ResumableFile:
    """Lines, each appended by one write.

    A checkpoint stores the file's length (``save``). After ``load`` (or ``start_afresh``, for a run without a
    checkpoint) the next line of training to be appended first drops what training wrote beyond that length,
    because a run that goes on from there writes it anew.
    Dropping waits for that line, since an evaluation loads a checkpoint too (the best one, with later lines
    behind it) and must drop nothing. A last line that a crash left unfinished is dropped in any case.
    Lines that a full disk refuses wait in memory until it takes them: whether it ends the run is its checkpoints'
    business.

    Arguments
    ---------
    path: the file; its folder is made with the first line
    written_again: whether a line is one that a resumed run writes again (and not, say, a test result)
    """

    def __init__(self, path: str | os.PathLike[str], written_again: Callable[[str], bool]):
        self.path = Path(path)
        self._written_again = written_again
        self._resume_at: int | None = None
        self._trained = False
        self._clean = False
        self._told = False
        self.waiting: deque[str] = deque(maxlen=_MOST_WAITING)

    def append(self, line: str) -> None:
        """Add ``line``, after those that wait."""
        self.waiting.append(line)
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            while self.waiting:
                self._write(self.waiting[0])
                self.waiting.popleft()
            self._told = False
        except OSError as error:
            if not self._told:
                logger.warning("%s. Its lines wait in memory until there is room", disk.explain(error, self.path))
            self._told = True

    def _write(self, line: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if not self._clean:
                self._clean = True
                _drop_broken_line(handle)
            if not self._trained and self._written_again(line):
                self._trained = True
                self._cut(handle)
            data = line.encode("utf-8") + b"\n"
            if os.write(handle, data) < len(data):  # the disk filled up within it
                self._clean = False
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            os.close(handle)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the present length into a checkpoint file."""
        self._write_waiting()
        if self._resume_at is not None and not self._trained:
            length = self._resume_at  # resumed, nothing trained since: lines beyond are still to be dropped
        else:
            length = self.path.stat().st_size if self.path.exists() else 0
        with atomic_write(path) as out:
            json.dump({"bytes": length}, out)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint file; ignored once this process has appended lines of training."""
        if not self._trained:
            self._resume_at = int(json.loads(Path(path).read_text(encoding="utf-8"))["bytes"])

    def start_afresh(self) -> None:
        """No checkpoint stands, training begins at its beginning: what an earlier start wrote goes as well."""
        if not self._trained:
            self._resume_at = 0

    def _cut(self, handle: int) -> None:
        size = os.fstat(handle).st_size
        if self._resume_at is None or self._resume_at >= size:
            return
        beyond = os.pread(handle, size - self._resume_at, self._resume_at).splitlines(keepends=True)
        kept = [line for line in beyond if not self._written_again(line.decode("utf-8", "replace"))]
        os.ftruncate(handle, self._resume_at)
        if kept:
            os.write(handle, b"".join(kept))


def _drop_broken_line(handle: int) -> None:
    size = end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(handle, end)
