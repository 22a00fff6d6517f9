"""Limit on the total space that uploads and decoded recordings take in the temporary folder."""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator

from sbkit.serve.errors import no_room
from sbkit.serve.limits import MEGABYTE

_FULL = {
    errno.ENOSPC: "the server's temporary folder is full",
    errno.EDQUOT: "the server's temporary folder is full",
    errno.EMFILE: "the server has reached its limit of open files",
    errno.ENFILE: "the server's machine has reached its limit of open files",
}


class Disk:
    """Space in the temporary folder, shared by all requests.

    max_bytes : bytes that may be used; never more than half of the free space
    share : the share of them that one client may use
    """

    def __init__(self, max_bytes: int, share: float = 1.0):
        self._max_bytes = max_bytes
        self._share = share
        self._clients: Counter[str | None] = Counter()
        self._folder = tempfile.gettempdir()  # fixed now: if it is full later, Python would choose another one
        self._lock = threading.Lock()
        self.reserved = 0
        """Bytes that are reserved, by all clients."""

    def change(self, more: int, client: str | None) -> None:
        """Reserve ``more`` bytes for a client, or release them if below 0; raises ``ApiError`` 503 without space."""
        with self._lock:
            if more > 0:
                limit = min(self._max_bytes, (shutil.disk_usage(self._folder).free + self.reserved) // 2)
                megabytes = math.ceil(more / MEGABYTE)
                if self.reserved + more > limit:
                    raise no_room(f"uploads and decoded audio may use {limit // MEGABYTE} MB of this server's disk, "
                                  f"{self.reserved // MEGABYTE} MB are in use, and this request needs "
                                  f"{megabytes} MB more")
                of_client = self._clients[client]
                if client is not None and of_client + more > self._share * limit:
                    raise no_room(f"one address may use {int(self._share * limit) // MEGABYTE} MB of this server's "
                                  f"disk, {of_client // MEGABYTE} MB are in use, and this request needs "
                                  f"{megabytes} MB more")
            self.reserved += more
            self._clients[client] += more
            self._clients += Counter()  # drops clients without any


class DiskReservation:
    """A reservation of disk space, empty at first."""

    def __init__(self, disk: Disk, client: str | None = None):
        self._disk = disk
        self._client = client
        self._size = 0

    def grow(self, size: int) -> None:
        """Grow to this many bytes; raises ``ApiError`` 503 if there is no space."""
        if size > self._size:
            self.resize(size)

    def resize(self, size: int) -> None:
        self._disk.change(size - self._size, self._client)
        self._size = size

    def close(self) -> None:
        self.resize(0)


@contextlib.contextmanager
def disk_errors_as_api_error() -> Iterator[None]:
    """Turn errors for lack of space or files within this block into an answer."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise no_room(_FULL[error.errno]) from None
        raise
