"""Limits the number of connections, so that files are left for everything that has to be opened.

One address may have a share of the places: beyond it, its own idle connections give way. If all
places are taken, the connection that has been idle the longest gives way to a new one. If all are busy, a few more are
let in to ask whether the server is alive; any other request on them is refused.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import time
from collections.abc import Collection
from typing import Any, Protocol

from sbkit.errors import SbkitError
from sbkit.serve.access import PROBES, App, Receive, Scope, Send
from sbkit.serve.errors import ApiError, no_room
from sbkit.serve.limits import Limits
from sbkit.serve.metrics import Metrics

_BACKLOG = 128
_SPARE = 8
_FEWEST = 8
_OWN_FILES = 48  # files of Python, the models and the event loop
_SAY_SECONDS = 60.0
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger(__name__)


def connection_budget(limits: Limits) -> tuple[int, int]:
    """Compute how many connections may be open, and how many may wait to be accepted, after raising this process's
    limit of open files."""
    needed = _OWN_FILES + limits.max_active + 2 * limits.decoders + _SPARE
    uploads = min(limits.max_requests, limits.max_connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + _BACKLOG + limits.max_connections + uploads
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    left = (wanted if soft == resource.RLIM_INFINITY else soft) - needed
    if left < 3 * _FEWEST:
        raise SbkitError(f"this process may open {soft} files, but needs {needed + 3 * _FEWEST}",
                         hint="raise the limit (ulimit -n), or lower --max-active")
    backlog = min(_BACKLOG, left // 3)  # those are accepted all at once, before the first of them can be refused
    most = max((left - backlog) // 2, left - backlog - uploads)  # an upload is a file in addition to its connection
    return min(limits.max_connections, most), backlog


class Connection(Protocol):
    """A connection as seen by the doors."""

    @property
    def address(self) -> str | None:
        """The client's address; None if it has no share of its own."""

    @property
    def idle_since(self) -> float | None:
        """When it became idle; None while a request is running."""

    def refuse(self, answer: bytes) -> None:
        """Send the answer and close."""


class ConnectionLimit:
    """Lets connections in.

    Arguments
    ---------
    most : connections open at once
    share : of them, for one address
    """

    def __init__(self, maximum: int, share: float, metrics: Metrics):
        self._most, self._metrics = maximum, metrics
        self._share = max(1, round(maximum * share))
        self._leaving: set[Connection] = set()
        self._said = -_SAY_SECONDS

    def enter(self, new: Connection, connections: Collection[Any]) -> bool:
        """Whether a new connection is let in for all requests."""
        mine = 0 if new.address is None else sum(
            each.address == new.address for each in connections if each not in self._leaving)
        if mine > self._share:
            self._log_once("%s has %d connections open, the limit of one address (--client-share)", new.address, mine)
            if not self._close_idle([each for each in connections if each.address == new.address], new):
                self._refuse(new)
                return False
        if len(connections) - len(self._leaving) <= self._most:
            return True
        self._log_once("%d connections are open, which is this server's limit (--max-connections, ulimit -n)",
                       self._most)
        if self._close_idle(connections, new):
            return True
        if len(connections) - len(self._leaving) > self._most + _SPARE:
            self._refuse(new)
        return False

    def left(self, connection: Connection) -> None:
        """Note that a connection is closed."""
        self._leaving.discard(connection)

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle errors of the event loop: lack of files to accept connections is reported many times a second."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_FILES:
            self._log_once("a connection can't be accepted: %s (ulimit -n)", error.strerror)
        else:
            loop.default_exception_handler(context)

    def only_probes(self, app: App) -> App:
        """Wrap the application for connections that may only ask whether the server is alive."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] in PROBES:
                await app(scope, receive, send)
                return
            self._metrics.refused.labels("too_many_connections").inc()
            error = _full()
            body, headers = _said(error)
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        return answer

    def _close_idle(self, connections: Collection[Any], new: Connection) -> bool:
        """Close the connection that has been idle the longest, if there is one."""
        idle = [each for each in connections if each is not new and each not in self._leaving
                and getattr(each, "idle_since", None) is not None]
        if idle:
            self._refuse(min(idle, key=lambda each: each.idle_since))
        return bool(idle)

    def _refuse(self, connection: Connection) -> None:
        self._metrics.refused.labels("too_many_connections").inc()
        self._leaving.add(connection)
        error = _full()
        body, headers = _said(error)
        lines = [b"HTTP/1.1 503 Service Unavailable", *(b": ".join(each) for each in headers), b"", body]
        connection.refuse(b"\r\n".join(lines))

    def _log_once(self, what: str, *values: Any) -> None:
        """Log a warning at most once a minute."""
        if time.monotonic() - self._said >= _SAY_SECONDS:
            self._said = time.monotonic()
            _log.warning(what, *values)


def _full() -> ApiError:
    error = no_room("this server has reached its limit of connections, or your address its share of them")
    error.code = "too_many_connections"
    return error


def _said(error: ApiError) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    body = json.dumps(error.body).encode()
    headers = {**error.headers, "content-type": "application/json", "content-length": str(len(body)),
               "connection": "close"}
    return body, [(name.encode(), value.encode()) for name, value in headers.items()]
