"""Limits the number of open connections, in all and of one address.

One address may have a share of the connections. A new one beyond that share replaces an idle one of the same address.
If all connections are taken, a new one replaces the one that has been idle the longest. If all are busy, a few more are
accepted for health checks; any other request on them is refused.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from collections.abc import Collection
from typing import Any, Protocol

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sbkit.errors import SbkitError
from sbkit.serve.access import PROBES
from sbkit.serve.errors import no_room
from sbkit.serve.limits import Limits
from sbkit.serve.metrics import Metrics

#: Connections that may wait to be accepted.
_BACKLOG = 128
#: Connections beyond the limit that may ask whether the server is alive.
_SPARE_FOR_PROBES = 8
#: With room for fewer connections, the server doesn't start.
_MIN_CONNECTIONS = 8
#: Open files of Python, the models and the event loop.
_BASE_FILES = 48
#: Seconds until a limit that is reached all the time is logged again.
_LOG_SECONDS = 60.0
#: Errors of ``accept`` when there are no more files or buffers.
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger(__name__)


def connection_budget(limits: Limits) -> tuple[int, int]:
    """Compute how many connections may be open, and how many may wait to be accepted, after raising this process's
    limit of open files."""
    needed = _BASE_FILES + limits.max_active + 2 * limits.decoders + _SPARE_FOR_PROBES
    uploads = min(limits.max_requests, limits.max_connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + _BACKLOG + limits.max_connections + uploads
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    left = (wanted if soft == resource.RLIM_INFINITY else soft) - needed  # for connections and their uploads
    if left < 3 * _MIN_CONNECTIONS:
        raise SbkitError("ulimit-too-low", f"this process may have {soft} files open, but needs "
                         f"{needed + 3 * _MIN_CONNECTIONS}", hint="raise the limit (ulimit -n), or lower --max-active")
    # Those that wait are accepted all at once, before the first of them can be refused.
    backlog = min(_BACKLOG, left // 3)
    # An upload is a file in addition to its connection.
    maximum = max((left - backlog) // 2, left - backlog - uploads)
    return min(limits.max_connections, maximum), backlog


class OpenConnection(Protocol):
    """A connection, of HTTP or a WebSocket, as the limit sees it."""

    address: str | None
    """That of the client; None if it isn't limited per address."""

    @property
    def idle_since(self) -> float | None:
        """When the last request ended, or the connection was made; None while one is running."""

    def refuse(self, response: bytes) -> None:
        """Close the connection, with ``response`` if it never got one. A WebSocket is never idle, so never refused."""


class ConnectionLimit:
    """Accepts connections up to a limit.

    maximum : connections open at once
    share : of them, for one address
    """

    def __init__(self, maximum: int, share: float, metrics: Metrics):
        self._maximum = maximum
        self._max_per_address = max(1, round(maximum * share))
        self._metrics = metrics
        self._closing: set[OpenConnection] = set()
        """Refused connections whose sockets aren't closed yet."""
        self._logged_at = -_LOG_SECONDS

    def admit(self, new: OpenConnection, connections: Collection[OpenConnection]) -> bool:
        """Whether a new connection, which is one of all ``connections``, is accepted for all requests.

        One that isn't may ask whether the server is alive, unless it is refused at once.
        """
        if not self._admit_for_address(new, connections):
            return False
        if self._open(connections) <= self._maximum:
            return True

        self._log_once("%d connections are open, the limit of this server (--max-connections, ulimit -n)",
                       self._maximum)
        if self._close_idle(connections, new):
            return True
        if self._open(connections) > self._maximum + _SPARE_FOR_PROBES:
            self._refuse(new)
        return False

    def _admit_for_address(self, new: OpenConnection, connections: Collection[OpenConnection]) -> bool:
        """Whether the address of a new connection has room for it, perhaps by closing an idle one of its own."""
        if new.address is None:
            return True
        of_address = [connection for connection in connections if connection.address == new.address]
        count = self._open(of_address)
        if count <= self._max_per_address:
            return True
        self._log_once("%s has %d connections open, the limit per address (--client-share)", new.address, count)
        if self._close_idle(of_address, new):
            return True
        self._refuse(new)
        return False

    def _open(self, connections: Collection[OpenConnection]) -> int:
        """Count the connections that aren't being closed."""
        return sum(connection not in self._closing for connection in connections)

    def _close_idle(self, connections: Collection[OpenConnection], new: OpenConnection) -> bool:
        """Close the connection that has been idle the longest, if there is one."""
        longest: OpenConnection | None = None
        longest_since = float("inf")
        for connection in connections:
            since = connection.idle_since
            if connection is new or connection in self._closing or since is None:
                continue
            if since < longest_since:
                longest = connection
                longest_since = since
        if longest is None:
            return False
        self._refuse(longest)
        return True

    def _refuse(self, connection: OpenConnection) -> None:
        self._metrics.refused.labels("too_many_connections").inc()
        self._closing.add(connection)
        response = _too_many_connections()
        headers = [b": ".join(header) for header in response.raw_headers]
        connection.refuse(b"\r\n".join([b"HTTP/1.1 503 Service Unavailable", *headers, b"", response.body]))

    def closed(self, connection: OpenConnection) -> None:
        """Forget a connection that has ended."""
        self._closing.discard(connection)

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # asyncio's own values
        """Handle errors of the event loop: lack of files to accept connections is reported many times a second."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_FILES:
            self._log_once("a connection can't be accepted: %s (ulimit -n)", error.strerror)
        else:
            loop.default_exception_handler(context)

    def only_probes(self, app: ASGIApp) -> ASGIApp:
        """Wrap the application for connections that may only ask whether the server is alive."""

        async def probes(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] in PROBES:
                await app(scope, receive, send)
                return
            self._metrics.refused.labels("too_many_connections").inc()
            await _too_many_connections()(scope, receive, send)

        return probes

    def _log_once(self, message: str, *values: object) -> None:
        if time.monotonic() - self._logged_at >= _LOG_SECONDS:
            self._logged_at = time.monotonic()
            _log.warning(message, *values)


def _too_many_connections() -> JSONResponse:
    error = no_room("too many connections are open, in all or from your address", "too_many_connections")
    error.headers["connection"] = "close"
    return error.response
