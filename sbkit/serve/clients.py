"""Client addresses, the share of all places that one client may have, and the turns in which they are given."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from sbkit.serve.errors import busy
from sbkit.serve.job import Job

_OWN = ("127.0.0.1", "::1")  # from which a proxy on this machine connects
_HOME = 64  # bits of an IPv6 prefix that a provider assigns to one home, which owns all addresses in it


def address(scope: Mapping[str, Any]) -> str | None:
    """The client's address; None for this machine's own, which may be that of a proxy for everybody."""
    try:
        found = ipaddress.ip_address((scope.get("client") or ("",))[0].partition("%")[0])
    except ValueError:
        return None
    found = getattr(found, "ipv4_mapped", None) or found
    if str(found) in _OWN:
        return None
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, _HOME), strict=False))


class Shares:
    """Counts places, and those that each client has; clients without an address have no share that is theirs.

    places : held at once
    share : of them, for one address
    """

    def __init__(self, places: int, share: float):
        self._places, self._most = places, max(1, round(places * share))
        self.taken: Counter[str | None] = Counter()
        """The places that each client has now."""

    @property
    def inside(self) -> int:
        return self.taken.total()

    @contextlib.contextmanager
    def place(self, client: str | None, what: str, seconds: float) -> Iterator[None]:
        """Hold one place; raises ``ApiError`` 429 if there is none, or the client has its full share.

        what, seconds : what has places, and when to try again if there are none
        """
        if self.inside >= self._places:
            raise busy(f"this server already has {self.inside} {what}", seconds)
        if client is not None and self.taken[client] >= self._most:
            raise busy(f"your address already has {self.taken[client]} {what}, the limit per address", 5)
        self.taken[client] += 1
        try:
            yield
        finally:
            self.taken[client] -= 1
            self.taken += Counter()  # drops clients without a place


class Turns:
    """Places that clients wait for: given in turn by address, and to one address at most a share of them.

    places : held at once
    share : of them, for one address
    """

    def __init__(self, places: int, share: float):
        self._free = self._places = places
        self._most = max(1, round(places * share))
        self._lock = threading.Lock()
        self._waiting: dict[str | None, deque[Future[None]]] = {}  # whose turn is next first
        self._held: Counter[str | None] = Counter()

    def wait(self, client: str | None) -> Future[None]:
        """Wait for a place, which has to be given :meth:`back` if the future can't be cancelled any more."""
        asked: Future[None] = Future()
        asked.add_done_callback(lambda _: self._leave(client, asked))
        with self._lock:
            self._waiting.setdefault(client, deque()).append(asked)
        self._give()
        return asked

    def ahead(self, client: str | None, asked: Future[None] | None = None) -> float:
        """How many of a client's must end before a new one begins, or one that waits, for each of the places that it
        may have."""
        with self._lock:
            waiting = self._waiting.get(client, deque())
            before = waiting.index(asked) if asked is not None and asked in waiting else len(waiting)
            return before / (self._places if client is None else self._most)

    def back(self, client: str | None) -> None:
        with self._lock:
            self._free += 1
            self._held[client] -= 1
            self._held += Counter()  # drops clients without a place
        self._give()

    @contextlib.contextmanager
    def place(self, job: Job) -> Iterator[None]:
        """Wait in a thread, and hold a place for the block; raises ``Cancelled`` with the job."""
        asked = self.wait(job.client)
        try:
            job.result(job.watch(asked))
            yield
        finally:
            if not asked.cancel():
                self.back(job.client)

    def _leave(self, client: str | None, asked: Future[None]) -> None:
        """Let others move up if one that waits is cancelled."""
        with self._lock:
            line = self._waiting.get(client)
            if asked.cancelled() and line and asked in line:
                line.remove(asked)
                if not line:
                    del self._waiting[client]

    def _give(self) -> None:
        with self._lock:
            given = []
            while self._free and (asked := self._next()) is not None:
                given.append(asked)
        for each in given:
            each.set_result(None)

    def _next(self) -> Future[None] | None:
        """Take the next that waits, and put its client last."""
        for client, line in list(self._waiting.items()):
            if client is not None and self._held[client] >= self._most:
                continue
            del self._waiting[client]
            while line:
                asked = line.popleft()
                if asked.set_running_or_notify_cancel():
                    if line:
                        self._waiting[client] = line
                    self._free -= 1
                    self._held[client] += 1
                    return asked
        return None
