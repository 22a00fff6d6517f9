"""An append-only file that a resumed run continues from its checkpoint, with no line lost or repeated."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks

from sbkit.system import disk
from sbkit.system.console import atomic_write

logger = logging.getLogger(__name__)

_MAX_WAITING = 100_000  # lines; some tens of megabytes


class ResumableFile:
    """A text file; each line is appended in one write.

    A checkpoint stores the file's length (``save``). After ``load`` (or ``start_afresh``, for a run without a
    checkpoint), the next line of training that is appended first removes the lines of training beyond that length,
    because the resumed run writes them again. They are not removed earlier, because an evaluation also loads a
    checkpoint (the best one) and must not remove later lines. An incomplete last line, left by a crash, is always
    removed. If the disk is full, lines wait in memory; it is up to the checkpoints whether this ends the run.

    path : the file; its folder is created with the first line
    written_again : returns whether a resumed run writes a line again (unlike, for example, a test result)
    """

    def __init__(self, path: str | os.PathLike[str], written_again: Callable[[str], bool]):
        self.path = Path(path)
        self._written_again = written_again
        self._resume_at: int | None = None
        """The length at the checkpoint from which the run continues; None: it continues from none."""
        self._wrote_training = False
        """Whether this process has written a line of training, and so removed those that it writes again."""
        self._ends_in_whole_line = False
        self._warned = False
        """Whether a warning says that lines wait."""
        self.waiting: deque[str] = deque(maxlen=_MAX_WAITING)
        """Lines for which the disk had no room yet."""

    def append(self, line: str) -> None:
        """Append a line, after those that are waiting."""
        self.waiting.append(line)
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            while self.waiting:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
                try:
                    self._write_line(handle, self.waiting[0])
                finally:
                    os.close(handle)
                self.waiting.popleft()
            self._warned = False
        except OSError as error:
            if not self._warned:
                logger.warning("%s. Its lines are kept in memory until there is room", disk.explain(error, self.path))
            self._warned = True

    def _write_line(self, handle: int, line: str) -> None:
        """Write a line, after removing what must not stay before it."""
        if not self._ends_in_whole_line:
            self._ends_in_whole_line = True
            self._remove_cut_line(handle)
        if not self._wrote_training and self._written_again(line):
            self._wrote_training = True
            self._remove_later_lines(handle)
        data = line.encode("utf-8") + b"\n"
        if os.write(handle, data) < len(data):  # the disk is full
            self._ends_in_whole_line = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    @staticmethod
    def _remove_cut_line(handle: int) -> None:
        """Remove a last line that a crash cut off."""
        content = os.pread(handle, os.fstat(handle).st_size, 0)
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.ftruncate(handle, end)

    def _remove_later_lines(self, handle: int) -> None:
        """Remove lines beyond the checkpoint's length that the resumed run writes again."""
        size = os.fstat(handle).st_size
        if self._resume_at is None or self._resume_at >= size:
            return
        later_lines = os.pread(handle, size - self._resume_at, self._resume_at).splitlines(keepends=True)
        other_lines = [line for line in later_lines if not self._written_again(line.decode("utf-8", "replace"))]
        os.ftruncate(handle, self._resume_at)
        if other_lines:
            os.write(handle, b"".join(other_lines))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the present length in a checkpoint file."""
        self._write_waiting()
        if self._resume_at is not None and not self._wrote_training:
            length = self._resume_at  # resumed, and later lines not removed yet
        else:
            length = self.path.stat().st_size if self.path.exists() else 0
        with atomic_write(path) as out:
            json.dump({"bytes": length}, out)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint file; ignored once this process has appended lines of training."""
        if not self._wrote_training:
            self._resume_at = int(json.loads(Path(path).read_text(encoding="utf-8"))["bytes"])

    def start_afresh(self) -> None:
        """Continue from an empty file, for a run without a checkpoint: lines of an earlier start are removed."""
        if not self._wrote_training:
            self._resume_at = 0


@register_checkpoint_hooks
class ResumableLog:
    """A log that a resumed run continues if it is among a checkpointer's recoverables."""

    _file: ResumableFile

    def flush(self) -> None:
        """Write all lines."""

    def start_afresh(self) -> None:
        """Drop the lines of an earlier start of this run, which left no checkpoint."""
        self._file.start_afresh()

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        self.flush()
        self._file.save(path)

    @mark_as_loader
    def _load(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        del end_of_epoch
        self._file.load(path)
