"""What uploads and decoded recordings take of the temporary folder, all together: bounded before it is full."""

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
         errno.EMFILE: "the server has as many files open as it may",
         errno.ENFILE: "the server's machine has as many files open as it can"}


class Disk:
    """The temporary folder.

    Arguments
    ---------
    most : bytes that may be taken; never more than half of what is free, so that others can write too
    """

    def __init__(self, most: int):
        self._most = most
        self._folder = tempfile.gettempdir()  # settled now: where it is full, Python would later take another one
        self._lock = threading.Lock()
        self.held = 0
        """Bytes that were promised to somebody."""

    def hold(self) -> Held:
        """A part of it, of nothing yet."""
        return Held(self)

    def _change(self, more: int) -> None:
        with self._lock:
            if more > 0:
                most = min(self._most, (shutil.disk_usage(self._folder).free + self.held) // 2)
                if self.held + more > most:
                    raise no_room(f"uploads and decoded audio may take {most // MEGABYTE} MB on this server's disk now "
                                  f"and {self.held // MEGABYTE} of them are in use; this one needs "
                                  f"{-(-more // MEGABYTE)} MB more")
            self.held += more


class Held:
    """Somebody's part."""

    def __init__(self, disk: Disk):
        self._disk, self._size = disk, 0

    def grow(self, size: int) -> None:
        """To so many bytes, if it has fewer; ``ApiError`` 503 where there is no room for them."""
        if size > self._size:
            self.keep(size)

    def keep(self, size: int) -> None:
        """So many bytes of it."""
        self._disk._change(size - self._size)
        self._size = size

    def close(self) -> None:
        """Give it back."""
        self.keep(0)


def said_of(error: OSError) -> ApiError | None:
    """The answer where the machine has no room for more; None where it's another error."""
    return no_room(_FULL[error.errno]) if error.errno in _FULL else None


@contextlib.contextmanager
def with_room() -> Iterator[None]:
    """What is written or opened within ends in an answer where there is no room for it."""
    try:
        yield
    except OSError as error:
        if (answer := said_of(error)) is not None:
            raise answer from None
        raise
