"""Limit on the total space that uploads and decoded recordings take in the temporary folder."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
import threading
from collections.abc import Iterator

from sbkit.serve.errors import ApiError, no_room
from sbkit.serve.limits import MEGABYTE

_FULL = {errno.ENOSPC: "the server's temporary folder is full", errno.EDQUOT: "the server's temporary folder is full",
         errno.EMFILE: "the server has reached its limit of open files",
         errno.ENFILE: "the server's machine has reached its limit of open files"}


class Disk:
    """Space in the temporary folder, shared by all requests.

    Arguments
    ---------
    most : bytes that may be used; never more than half of the free space, so that others can write too
    """

    def __init__(self, most: int):
        self._most = most
        self._folder = tempfile.gettempdir()  # fixed now: if it is full later, Python would choose another one
        self._lock = threading.Lock()
        self.held = 0
        """Bytes that are reserved."""

    def hold(self) -> Held:
        """Make an empty reservation."""
        return Held(self)

    def _change(self, more: int) -> None:
        with self._lock:
            if more > 0:
                most = min(self._most, (shutil.disk_usage(self._folder).free + self.held) // 2)
                if self.held + more > most:
                    raise no_room(f"uploads and decoded audio may use {most // MEGABYTE} MB of this server's disk now, "
                                  f"{self.held // MEGABYTE} MB are in use, and this request needs "
                                  f"{-(-more // MEGABYTE)} MB more")
            self.held += more


class Held:
    """A reservation of disk space."""

    def __init__(self, disk: Disk):
        self._disk, self._size = disk, 0

    def grow(self, size: int) -> None:
        """Grow to this many bytes; raises ``ApiError`` 503 if there is no room for them."""
        if size > self._size:
            self.keep(size)

    def keep(self, size: int) -> None:
        """Shrink to this many bytes."""
        self._disk._change(size - self._size)
        self._size = size

    def close(self) -> None:
        """Release the reservation."""
        self.keep(0)


def said_of(error: OSError) -> ApiError | None:
    """The answer to an error for lack of space or files; None for any other error."""
    return no_room(_FULL[error.errno]) if error.errno in _FULL else None


@contextlib.contextmanager
def with_room() -> Iterator[None]:
    """Turn errors for lack of space or files within this block into an answer."""
    try:
        yield
    except OSError as error:
        if (answer := said_of(error)) is not None:
            raise answer from None
        raise
