"""Limits the number of connections, and closes those that send no request, send one too slowly, or don't read.

One address may have a share of the connections. A new one beyond that share replaces an idle one of the same address.
If all connections are taken, a new one replaces the one that has been idle the longest. If all are busy, a few more are
accepted for health checks; any other request on them is refused.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import resource
import socket
import time
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from sbkit.errors import SbkitError
from sbkit.serve.access import PROBES
from sbkit.serve.clients import address
from sbkit.serve.errors import no_room
from sbkit.serve.limits import Limits
from sbkit.serve.metrics import Metrics

_BACKLOG = 128
_SPARE_FOR_PROBES = 8
_MIN_CONNECTIONS = 8
_BASE_FILES = 48  # files of Python, the models and the event loop
_LOG_SECONDS = 60.0
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
        raise SbkitError(f"this process may open {soft} files, but needs {needed + 3 * _MIN_CONNECTIONS}",
                         hint="raise the limit (ulimit -n), or lower --max-active")
    # Those that wait are accepted all at once, before the first of them can be refused.
    backlog = min(_BACKLOG, left // 3)
    # An upload is a file in addition to its connection.
    maximum = max((left - backlog) // 2, left - backlog - uploads)
    return min(limits.max_connections, maximum), backlog


class ConnectionLimit:
    """Accepts connections up to a limit.

    maximum : connections open at once
    share : of them, for one address
    """

    def __init__(self, maximum: int, share: float, metrics: Metrics):
        self._maximum = maximum
        self._metrics = metrics
        self._share = max(1, round(maximum * share))
        self._leaving: set[TimedConnection] = set()  # they are being closed
        self._logged = -_LOG_SECONDS

    def admit(self, new: TimedConnection, connections: Collection[Any]) -> bool:
        """Whether a new connection is accepted for all requests."""
        if new.address is not None:
            of_address = [connection for connection in connections if connection.address == new.address]
            count = sum(connection not in self._leaving for connection in of_address)
            if count > self._share:
                self._log_once("%s has %d connections open, the limit per address (--client-share)", new.address, count)
                if not self._close_idle(of_address, new):
                    self._refuse(new)
                    return False
        if len(connections) - len(self._leaving) <= self._maximum:
            return True
        self._log_once("%d connections are open, the limit of this server (--max-connections, ulimit -n)",
                       self._maximum)
        if self._close_idle(connections, new):
            return True
        if len(connections) - len(self._leaving) > self._maximum + _SPARE_FOR_PROBES:
            self._refuse(new)
        return False

    def closed(self, connection: TimedConnection) -> None:
        self._leaving.discard(connection)

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
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

    def _close_idle(self, connections: Collection[Any], new: TimedConnection) -> bool:
        """Close the connection that has been idle the longest, if there is one."""
        idle = [connection for connection in connections if connection is not new and connection not in self._leaving
                and getattr(connection, "idle_since", None) is not None]  # WebSockets have none
        if not idle:
            return False
        self._refuse(min(idle, key=lambda connection: connection.idle_since))
        return True

    def _refuse(self, connection: TimedConnection) -> None:
        self._metrics.refused.labels("too_many_connections").inc()
        self._leaving.add(connection)
        response = _too_many_connections()
        headers = [b": ".join(header) for header in response.raw_headers]
        connection.refuse(b"\r\n".join([b"HTTP/1.1 503 Service Unavailable", *headers, b"", response.body]))

    def _log_once(self, what: str, *values: Any) -> None:
        if time.monotonic() - self._logged >= _LOG_SECONDS:
            self._logged = time.monotonic()
            _log.warning(what, *values)


def _too_many_connections() -> JSONResponse:
    error = no_room("too many connections are open, in all or from your address")
    error.code = "too_many_connections"
    error.headers["connection"] = "close"
    return error.response


CHECK_SECONDS = 5.0
_SLOW_READER_SECONDS = 60.0  # for a client to read any of what waits for it
_CLOSE_SECONDS = 10.0  # to read what was sent to a WebSocket before its end
_UNREAD_BYTES = 1 << 14  # sent and not read, in the system's buffer and in this process
_MESSAGES, _LONG_MESSAGE = 16, 1 << 16  # of a WebSocket that may wait, and bytes of one that doesn't
_READ_BYTES = 1 << 12  # of a WebSocket at once: at most some 700 of the smallest frames, in a few milliseconds
_READ_HTTP_BYTES = 1 << 12  # of HTTP at once: at most some 700 of the smallest chunks
_DROP_BYTES = 1 << 18  # of HTTP at once, of a request that has its response: they are dropped unread
_HEADERS_BYTES = 1 << 14  # of a request, with its path
_LIVE_FRAME_BYTES = 8 << 20
_NO_HANDSHAKE = b"this is not a valid WebSocket request: a header is invalid or too long, or there are too many headers"


def protocol_options(limit: ConnectionLimit) -> dict[str, Any]:
    """uvicorn's options for such connections."""
    # No limit for a ping's answer: it comes after audio that a busy server may not have read for long.
    return {"loop": "asyncio", "http": functools.partial(TimedConnection, limit), "ws": LiveSocket,
            "ws_ping_timeout": None, "ws_max_size": _LIVE_FRAME_BYTES, "ws_per_message_deflate": False,
            "h11_max_incomplete_event_size": _HEADERS_BYTES}


def _client_address(peer: tuple[str, int] | None, config: uvicorn.Config) -> str | None:
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


class TimedConnection(H11Protocol):
    """HTTP connection with a time limit for a request's headers, which uvicorn lacks.

    limit : decides whether the connection is admitted
    options : options of uvicorn's protocol
    """

    def __init__(self, limit: ConnectionLimit, **options: Any):
        super().__init__(**options)
        self._limit = limit
        self._admitted = True
        self._answered_early = False  # before a request was received to the end
        self.app = self._close_if_early(self.app)
        self._idle_from = time.monotonic()

    @property
    def idle_since(self) -> float | None:
        """When the last request ended, or the connection was made; None while a request is running."""
        return self._idle_from if self.cycle is None or self.cycle.response_complete else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        transport.max_size = _READ_HTTP_BYTES  # type: ignore[attr-defined]  # of asyncio's own
        self.address = _client_address(self.client, self.config)
        self._last_cycle: object = self
        self._watch = self.loop.call_later(CHECK_SECONDS, self._check_idle)
        self._admitted = self._limit.admit(self, self.connections)
        if not self._admitted:
            self.app = self._limit.only_probes(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)
        self._limit.closed(self)

    def on_response_complete(self) -> None:
        self._idle_from = time.monotonic()
        super().on_response_complete()
        if self.cycle.transport is not self.transport and not self.transport.is_closing():
            self._answered_early = True
            self.transport.max_size = _DROP_BYTES  # type: ignore[attr-defined]  # of asyncio's own
            self.transport.write_eof()

    def _close_if_early(self, app: ASGIApp) -> ASGIApp:
        """Wrap the application: a response that starts before its request was received to the end says that the
        connection closes, because the rest of the request is dropped, and what the client sends after it, too.

        Closing at once would make the system drop a response that the client hasn't read, so only writing ends, and
        the connection is closed when the client closes it or is idle.
        """

        async def closing(scope: Scope, receive: Receive, send: Send) -> None:
            async def answer(message: Message) -> None:
                if message["type"] == "http.response.start" and self.conn.their_state is h11.SEND_BODY:
                    cycle = self.cycle
                    headers = [(name, value) for name, value in message.get("headers", [])
                               if name.lower() != b"connection"]
                    message = {**message, "headers": [*headers, (b"connection", b"close")]}

                    def close() -> None:
                        if not cycle.keep_alive:  # the server is stopping
                            self.transport.close()

                    cycle.transport = cast(Any, SimpleNamespace(write=self.transport.write, close=close,
                                                                is_closing=self.transport.is_closing))
                await send(message)

            await app(scope, receive, answer)

        return closing

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, except the rest of a request that has its response already."""
        if not self._answered_early:
            super().data_received(data)

    def pause_writing(self) -> None:
        """Stop writing, and cut the connection if the client reads nothing for long."""
        super().pause_writing()
        self._unread = self.loop.call_later(_SLOW_READER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._unread.cancel()
        super().resume_writing()

    def refuse(self, response: bytes) -> None:
        """Close the connection, with ``response`` if it never got one."""
        if self.cycle is None:
            self.transport.write(response)
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return self._admitted and super()._should_upgrade()

    def _check_idle(self) -> None:
        """Close the connection if no request ran for a whole period; after a response uvicorn only waits for bytes."""
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # it became a WebSocket
            return
        idle = self.idle_since is not None
        if idle and self._last_cycle is self.cycle:
            if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
                self.send_400_response(f"The request's headers took more than {CHECK_SECONDS:g} s.")
            self.transport.close()
            return
        self._last_cycle = self.cycle if idle else self
        self._watch = self.loop.call_later(CHECK_SECONDS, self._check_idle)


class LiveSocket(WebSocketsSansIOProtocol):
    """WebSocket for many small messages, which is cut soon after its end, even if the client doesn't read.

    uvicorn stops reading from a connection at each message until the application takes it. These two system calls
    double the time of a packet of 20 ms. Here some may wait.

    asyncio reads up to 256 KiB at once, and all frames in it are handled before any other client's: with the smallest
    frames, that takes a second. Here it reads a few packets at once.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Limit the bytes that wait for a slow reader, and those that are read from one client at a time."""
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        transport.set_write_buffer_limits(_UNREAD_BYTES)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of asyncio's own, which the server asks for
        self._pong = b""  # a pong that could not be sent yet
        super().connection_made(transport)
        self.address = _client_address(self.client, self.config)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived. The first data is the whole request: if it starts no handshake, nothing will."""
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
                                 b"content-length: %d\r\nconnection: close\r\n\r\n%b"
                                 % (len(_NO_HANDSHAKE), _NO_HANDSHAKE))
            self.transport.close()

    def handle_ping(self) -> None:
        """Answer a ping; while the client doesn't read, only the last pong is kept, as the protocol allows."""
        self._pong = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self._send_pong()

    def resume_writing(self) -> None:
        """Write again, a waiting pong first."""
        super().resume_writing()
        self._send_pong()

    def _send_pong(self) -> None:
        pong = self._pong
        self._pong = b""
        if pong and not self.close_sent:
            self.transport.write(pong)

    def handle_cont(self, event: Frame) -> None:
        """Take a part of a message, but no empty one: it would be kept without counting towards the size limit."""
        if event.data or event.fin:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Queue a message for the application, and stop reading if many or long ones wait."""
        paused = self.read_paused
        self.read_paused = True  # so that uvicorn doesn't stop reading by itself
        size = sum(map(len, self.frames))
        super().send_receive_event_to_app()
        self.read_paused = paused
        if not paused and (size > _LONG_MESSAGE or self.queue.qsize() >= _MESSAGES):
            self.read_paused = True
            self.transport.pause_reading()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Cut the connection, if it isn't closed by then."""
        super().on_task_complete(task)
        self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)
