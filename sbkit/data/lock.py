"""Kernel file locks: a process holds one until it releases it or dies."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from sbkit.errors import SbkitError
from sbkit.system.console import remove_partials

logger = logging.getLogger(__name__)


class Lock(contextlib.AbstractContextManager["Lock"]):
    """An open file or folder that can be locked. Processes forked meanwhile don't share the lock.

    flags : as ``os.open`` takes them
    """

    _open: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self, path: str | os.PathLike[str], flags: int = os.O_RDONLY):
        self.path = Path(path)
        self.handle: int | None = os.open(path, flags, 0o666)
        Lock._open.add(self)

    @property
    def descriptor(self) -> int:
        """The file descriptor."""
        if self.handle is None:
            raise ValueError(f"{self.path} was closed")
        return self.handle

    def acquire(self, *, wait: bool = False, shared: bool = False) -> bool | None:
        """Try to lock it; return whether this process holds the lock now, or None if the file system has no locks.

        wait : block until the lock is free
        shared : allow other processes that also ask for a shared lock
        """
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
        """Whether the open file is still the one at this path."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the lock and close the file."""
        Lock._open.discard(self)
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    def __exit__(self, *error: object) -> None:
        self.close()


def _close_all() -> None:
    for lock in list(Lock._open):
        lock.close()


# The kernel releases a lock only when no process has the file open, and forked workers would have it open.
os.register_at_fork(after_in_child=_close_all)


def remove_unheld(folder: Path, unless_older: float = 0.0,
                  remove: Callable[[Path], object] | None = None) -> bool:
    """Delete a folder unless a living process holds its lock; return whether it was deleted.

    unless_older : on a file system without locks, delete it only if it is older than this many seconds
    remove : deletes it, or decides to leave it; None: deletes it with all that it holds
    """
    with Lock(folder) as lock:
        free = lock.acquire()
        if free is False or not lock.is_at(folder):  # another process deleted it, and may have created it again
            return False
        if free is None and time.time() - folder.stat().st_mtime < unless_older:
            return False
        (remove or shutil.rmtree)(folder)
    return not folder.exists()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on the file ``path``, waiting for it if needed; a file system without locks is ignored.

    What killed writers left unfinished in its folder is removed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(path, os.O_WRONLY | os.O_CREAT)
    except OSError as error:
        raise SbkitError("not-writable", f"{error.filename or path}: cannot be written ({error.strerror})",
                         file=error.filename or path) from None
    with lock:
        if lock.acquire() is False:
            logger.warning("%s: another process is working there, waiting for it", path.parent)
            lock.acquire(wait=True)
        remove_partials(path.parent)
        yield
