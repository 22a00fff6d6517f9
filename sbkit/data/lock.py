"""Locks of the kernel: a file or folder that one process holds until it lets go, or dies, however it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from sbkit.errors import SbkitError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # `take` asks

logger = logging.getLogger(__name__)


class Lock:
    """An open file or folder that can be locked. Processes that are forked meanwhile have no part in it.

    flags : as ``os.open`` takes them
    """

    _open: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self, path: str | os.PathLike[str], flags: int = os.O_RDONLY):
        self.path = Path(path)
        self.handle: int | None = os.open(path, flags, 0o666)
        Lock._open.add(self)

    @property
    def descriptor(self) -> int:
        """The number of the open file."""
        if self.handle is None:
            raise ValueError(f"{self.path} was closed")
        return self.handle

    def take(self, *, wait: bool = False, shared: bool = False) -> bool | None:
        """Whether this process holds it now; None where the file system has no locks.

        shared : beside others that share it, but not beside one that holds it alone
        """
        if fcntl is None:
            return None
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self.descriptor, how if wait else how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # some network file systems
            logger.debug("%s: no lock (%s)", self.path, error)
            return None
        return True

    def is_at(self, path: Path) -> bool:
        """Whether what is open is what has this name by now."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go."""
        Lock._open.discard(self)
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _close_all() -> None:
    for lock in list(Lock._open):
        lock.close()


if fcntl is not None:  # the kernel drops a lock once nobody has the file open any more, the holder's workers included
    os.register_at_fork(after_in_child=_close_all)


def remove_unheld(folder: Path, unless_older: float = 0.0) -> bool:
    """Delete a folder, unless a living process holds it; gives whether this one did.

    unless_older : seconds, for a file system without locks
    """
    with Lock(folder) as lock:
        free = lock.take()
        if free is False or not lock.is_at(folder):  # another process deleted it, and may have made it anew
            return False
        if free is None and time.time() - folder.stat().st_mtime < unless_older:
            return False
        shutil.rmtree(folder)
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file ``path``; a second process that wants it waits. Without locks, it goes on without one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(path, os.O_WRONLY | os.O_CREAT)
    except OSError as error:
        raise SbkitError(f"{error.filename or path}: cannot be written ({error.strerror})") from None
    with lock:
        if lock.take() is False:
            logger.warning("%s: another process is at work there, waiting for it", path.parent)
            lock.take(wait=True)
        yield
