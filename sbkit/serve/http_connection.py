"""An HTTP connection that is closed if its client sends no request, sends one too slowly, or doesn't read.

It extends a protocol of uvicorn that isn't public: setup.cfg has the releases for which that was tried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any, cast

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sbkit.serve.clients import address_of_peer
from sbkit.serve.connection_limit import ConnectionLimit, OpenConnection

#: Seconds in which a request's headers have to come.
CHECK_SECONDS = 5.0
#: Seconds in which a client has to read any of what waits for it.
_SLOW_READER_SECONDS = 60.0
#: Bytes that are read at once: at most some 700 of the smallest chunks.
_READ_BYTES = 1 << 12
#: The same of a request that has its response already: they are dropped unread.
_DROP_BYTES = 1 << 18


class TimedConnection(H11Protocol):
    """HTTP connection with a time limit for a request's headers, which uvicorn lacks.

    limit : decides whether the connection is admitted
    options : options of uvicorn's protocol
    """

    def __init__(self, limit: ConnectionLimit, **options: Any):  # Any: uvicorn's own
        super().__init__(**options)
        self._limit = limit
        self._admitted = True
        self._answered_early = False  # before a request was received to the end
        self.app = self._announcing_close(self.app)
        self._idle_from = time.monotonic()
        self._cycle_at_check: object = self
        """The request that had ended at the last check; ``self``: one was running, or there was no check yet."""

    @property
    def idle_since(self) -> float | None:
        """When the last request ended, or the connection was made; None while a request is running."""
        return self._idle_from if self.cycle is None or self.cycle.response_complete else None

    # ---------------------------------------------------------------------- the connection's life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of asyncio's own
        self.address = address_of_peer(self.client, self.config)
        self._watch = self.loop.call_later(CHECK_SECONDS, self._check_idle)
        connections = cast(Collection[OpenConnection], self.connections)  # uvicorn makes them of our classes alone
        self._admitted = self._limit.admit(self, connections)
        if not self._admitted:
            self.app = self._limit.only_probes(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)
        self._limit.closed(self)

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
        if idle and self._cycle_at_check is self.cycle:
            if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
                self.send_400_response(f"The request's headers took more than {CHECK_SECONDS:g} s.")
            self.transport.close()
            return
        self._cycle_at_check = self.cycle if idle else self
        self._watch = self.loop.call_later(CHECK_SECONDS, self._check_idle)

    # ---------------------------------------------------------------------- a client that doesn't read

    def pause_writing(self) -> None:
        """Stop writing, and cut the connection if the client reads nothing for long."""
        super().pause_writing()
        self._unread = self.loop.call_later(_SLOW_READER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._unread.cancel()
        super().resume_writing()

    # ---------------------------------------------------------------------- a response before the request's end

    def _announcing_close(self, app: ASGIApp) -> ASGIApp:
        """Wrap the application: a response that starts before its request was received to the end says that the
        connection closes, because the rest of the request is dropped, and what the client sends after it, too."""

        async def announcing(scope: Scope, receive: Receive, send: Send) -> None:
            async def answer(message: Message) -> None:
                if message["type"] == "http.response.start" and self.conn.their_state is h11.SEND_BODY:
                    headers = [(name, value) for name, value in message.get("headers", [])
                               if name.lower() != b"connection"]
                    message = {**message, "headers": [*headers, (b"connection", b"close")]}
                    cycle: Any = self.cycle  # whose transport is declared as asyncio's
                    cycle.transport = _WriteOnly(self.transport, cycle)
                await send(message)

            await app(scope, receive, answer)

        return announcing

    def on_response_complete(self) -> None:
        self._idle_from = time.monotonic()
        super().on_response_complete()
        if self.cycle.transport is not self.transport and not self.transport.is_closing():
            self._answered_early = True
            self.transport.max_size = _DROP_BYTES  # type: ignore[attr-defined]  # of asyncio's own
            self.transport.write_eof()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, except the rest of a request that has its response already."""
        if not self._answered_early:
            super().data_received(data)


class _WriteOnly:
    """The transport that uvicorn has for a response before its request's end: it doesn't close the connection then.

    Closing at once would make the system drop a response that the client hasn't read, so only writing ends, and the
    connection is closed when the client closes it or is idle.
    """

    def __init__(self, transport: asyncio.Transport, cycle: Any):  # a RequestResponseCycle of uvicorn, not public
        self._cycle = cycle
        self.write = transport.write
        self.is_closing = transport.is_closing
        self._close = transport.close

    def close(self) -> None:
        if not self._cycle.keep_alive:  # the server is stopping
            self._close()
