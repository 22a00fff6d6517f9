"""Closes connections that send no request, or take too long to send one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from sbkit.serve.doors import Doors

_LOOK_SECONDS = 15.0


class Impatient(H11Protocol):
    """HTTP connection with a time limit for a request's headers, which uvicorn lacks.

    Arguments
    ---------
    doors : decide whether the connection is let in
    options : options of uvicorn's protocol
    """

    def __init__(self, doors: Doors, **options: Any):
        super().__init__(**options)
        self._doors, self._whole = doors, True
        self._idle_from = time.monotonic()

    @property
    def idle_since(self) -> float | None:
        """When the last request ended, or the connection was made; None while a request is running."""
        return self._idle_from if self.cycle is None or self.cycle.response_complete else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start watching the connection."""
        super().connection_made(transport)
        self._seen: object = self
        self._watch = self.loop.call_later(_LOOK_SECONDS, self._look)
        self._whole = self._doors.enter(self, self.connections)
        if not self._whole:
            self.app = self._doors.only_probes(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching the connection."""
        self._watch.cancel()
        super().connection_lost(exc)
        self._doors.left(self)

    def on_response_complete(self) -> None:
        """Note that the connection is idle now."""
        self._idle_from = time.monotonic()
        super().on_response_complete()

    def refuse(self, answer: bytes) -> None:
        """Close the connection, with ``answer`` if it never got a response."""
        if self.cycle is None:
            self.transport.write(answer)
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return self._whole and super()._should_upgrade()

    def _look(self) -> None:
        """Close the connection if no request ran for a whole period; after a response uvicorn only waits for bytes."""
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # it became a WebSocket
            return
        idle = self.idle_since is not None
        if idle and self._seen is self.cycle:
            self.transport.close()
            return
        self._seen = self.cycle if idle else self
        self._watch = self.loop.call_later(_LOOK_SECONDS, self._look)
