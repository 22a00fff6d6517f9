"""Limit on the total space that uploads and decoded recordings take in the temporary folder."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator

from sbkit.serve.errors import ApiError, no_room
from sbkit.serve.limits import MEGABYTE

_FULL = {errno.ENOSPC: "the server's temporary folder is full", errno.EDQUOT: "the server's temporary folder is full",
         errno.EMFILE: "the server has reached its limit of open files",
         errno.ENFILE: "the server's machine has reached its limit of open files"}


class Disk:
    """Space in the temporary folder, shared by all requests.

    most : bytes that may be used; never more than half of the free space, so that others can write too
    share : of them, for one client
    """

    def __init__(self, max_bytes: int, share: float = 1.0):
        self._most, self._share = max_bytes, share
        self._clients: Counter[str | None] = Counter()
        self._folder = tempfile.gettempdir()  # fixed now: if it is full later, Python would choose another one
        self._lock = threading.Lock()
        self.held = 0
        """Bytes that are reserved."""

    def change(self, more: int, client: str | None) -> None:
        """Reserve so many more bytes for a client, or less; raises ``ApiError`` 503 if there is no room for them."""
        with self._lock:
            if more > 0:
                most = min(self._most, (shutil.disk_usage(self._folder).free + self.held) // 2)
                if self.held + more > most:
                    raise no_room(f"uploads and decoded audio may use {most // MEGABYTE} MB of this server's disk now, "
                                  f"{self.held // MEGABYTE} MB are in use, and this request needs "
                                  f"{-(-more // MEGABYTE)} MB more")
                mine = self._clients[client]
                if client is not None and mine + more > self._share * most:
                    raise no_room(f"one address may use {int(self._share * most) // MEGABYTE} MB of this server's disk "
                                  f"now, {mine // MEGABYTE} MB are in use, and this request needs "
                                  f"{-(-more // MEGABYTE)} MB more")
            self.held += more
            self._clients[client] += more
            self._clients += Counter()  # drops clients without any


class DiskReservation:
    """A reservation of disk space, empty at first."""

    def __init__(self, disk: Disk, client: str | None = None):
        self._disk, self._client, self._size = disk, client, 0

    def grow(self, size: int) -> None:
        """Grow to this many bytes; raises ``ApiError`` 503 if there is no room for them."""
        if size > self._size:
            self.keep(size)

    def keep(self, size: int) -> None:
        self._disk.change(size - self._size, self._client)
        self._size = size

    def close(self) -> None:
        self.keep(0)


def described(error: OSError) -> ApiError | None:
    """The answer to an error for lack of space or files; None for any other error."""
    return no_room(_FULL[error.errno]) if error.errno in _FULL else None


@contextlib.contextmanager
def with_room() -> Iterator[None]:
    """Turn errors for lack of space or files within this block into an answer."""
    try:
        yield
    except OSError as error:
        if (answer := described(error)) is not None:
            raise answer from None
        raise
