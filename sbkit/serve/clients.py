"""Client addresses, the share of all slots that one client may have, and the queue for them."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from uvicorn import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from sbkit.serve.errors import busy
from sbkit.serve.job import Job

_LOOPBACK = ("127.0.0.1", "::1")  # from which a proxy on this machine connects
_HOME_BITS = 64  # bits of an IPv6 prefix that a provider assigns to one home, which owns all addresses in it


def address(scope: Mapping[str, Any]) -> str | None:
    """The client's address; None for this machine's own, which may be that of a proxy for everybody."""
    host, *_ = scope.get("client") or ("",)
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if str(ip) in _LOOPBACK:
        return None
    if ip.version == 4:
        return str(ip)
    return str(ipaddress.ip_network((ip, _HOME_BITS), strict=False))


def address_of_peer(peer: tuple[str, int] | None, config: Config) -> str | None:
    """The address to count a connection for; None for a trusted proxy, whose connections are everybody's."""
    if peer and config.proxy_headers:
        trusted = config.forwarded_allow_ips
        if _is_proxy(peer[0], trusted if isinstance(trusted, str) else ",".join(trusted)):
            return None
    return address({"client": peer})


@functools.lru_cache(1024)
def _is_proxy(host: str, trusted: str) -> bool:
    app: Any = None  # never called
    return host in ProxyHeadersMiddleware(app, trusted).trusted_hosts


class Shares:
    """Counts slots in total and per client; clients without an address have no limit per client.

    slots : in use at once
    share : the share of them that one address may have
    """

    def __init__(self, slots: int, share: float):
        self._slots = slots
        self._max_per_client = max(1, round(slots * share))
        self.taken: Counter[str | None] = Counter()
        """The slots that each client has now."""

    @property
    def active(self) -> int:
        return self.taken.total()

    @contextlib.contextmanager
    def slot(self, client: str | None, what: str, seconds: float) -> Iterator[None]:
        """Hold one slot; raises ``ApiError`` 429 if there is none, or the client has its full share.

        what, seconds : what the slots are for, and when to try again if there are none
        """
        if self.active >= self._slots:
            raise busy(f"this server already has {self.active} {what}", seconds)
        if client is not None and self.taken[client] >= self._max_per_client:
            raise busy(f"your address already has {self.taken[client]} {what}, the limit per address", 5)
        self.taken[client] += 1
        try:
            yield
        finally:
            self.taken[client] -= 1
            self.taken += Counter()  # drops clients without a slot


class FairQueue:
    """Queue for slots, which are granted in turn by address, and to one address at most a share of them.

    slots : in use at once
    share : the share of them that one address may have
    """

    def __init__(self, slots: int, share: float):
        self._free = self._slots = slots
        self._max_per_client = max(1, round(slots * share))
        self._lock = threading.Lock()
        self._waiting: dict[str | None, deque[Future[None]]] = {}  # whose turn is next first
        self._taken: Counter[str | None] = Counter()

    def acquire(self, client: str | None) -> Future[None]:
        """Queue for a slot; once the future can't be cancelled any more, call :meth:`release` at the end."""
        future: Future[None] = Future()
        future.add_done_callback(lambda _: self._remove(client, future))
        with self._lock:
            self._waiting.setdefault(client, deque()).append(future)
        self._grant()
        return future

    def ahead(self, client: str | None, future: Future[None] | None = None) -> float:
        """How many requests of a client must end before a new or a waiting one starts, per slot that it may have."""
        with self._lock:
            waiting = self._waiting.get(client, deque())
            before = waiting.index(future) if future is not None and future in waiting else len(waiting)
            return before / (self._slots if client is None else self._max_per_client)

    def release(self, client: str | None) -> None:
        with self._lock:
            self._free += 1
            self._taken[client] -= 1
            self._taken += Counter()  # drops clients without a slot
        self._grant()

    @contextlib.contextmanager
    def slot(self, job: Job) -> Iterator[None]:
        """Wait in a thread, and hold a slot for the block; raises ``Cancelled`` with the job."""
        future = self.acquire(job.client)
        try:
            job.result(job.watch(future))
            yield
        finally:
            if not future.cancel():
                self.release(job.client)

    def _remove(self, client: str | None, future: Future[None]) -> None:
        """Remove a cancelled one from the queue."""
        with self._lock:
            queue = self._waiting.get(client)
            if future.cancelled() and queue and future in queue:
                queue.remove(future)
                if not queue:
                    del self._waiting[client]

    def _grant(self) -> None:
        granted = []
        with self._lock:
            while self._free:
                future = self._next()
                if future is None:
                    break
                granted.append(future)
        for future in granted:
            future.set_result(None)

    def _next(self) -> Future[None] | None:
        """Take the next one, and put its client last."""
        for client, queue in list(self._waiting.items()):
            if client is not None and self._taken[client] >= self._max_per_client:
                continue
            del self._waiting[client]
            while queue:
                future = queue.popleft()
                if future.set_running_or_notify_cancel():
                    if queue:
                        self._waiting[client] = queue
                    self._free -= 1
                    self._taken[client] += 1
                    return future
        return None
