"""Connections that ask for nothing, or take forever over it, are closed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from sbkit.serve.doors import Doors

_LOOK_SECONDS = 15.0


class Impatient(H11Protocol):
    """uvicorn has no limit for the time that a request's headers take.

    Arguments
    ---------
    doors : let it in
    options : uvicorn's
    """

    def __init__(self, doors: Doors, **options: Any):
        super().__init__(**options)
        self._doors, self._whole = doors, True
        self._idle_from = time.monotonic()

    @property
    def idle_since(self) -> float | None:
        """When it ended its last request, or came; None while one is at work."""
        return self._idle_from if self.cycle is None or self.cycle.response_complete else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Begin to watch."""
        super().connection_made(transport)
        self._seen: Any = self
        self._watch = self.loop.call_later(_LOOK_SECONDS, self._look)
        self._whole = self._doors.enter(self, self.connections)
        if not self._whole:
            self.app = self._doors.only_probes(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended by itself."""
        self._watch.cancel()
        super().connection_lost(exc)
        self._doors.left(self)

    def on_response_complete(self) -> None:
        """It is idle now."""
        self._idle_from = time.monotonic()
        super().on_response_complete()

    def refuse(self, answer: bytes) -> None:
        """Close it; who was never answered is told why."""
        if self.cycle is None:
            self.transport.write(answer)
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return self._whole and super()._should_upgrade()

    def _look(self) -> None:
        """Close what had no request in work for a whole turn; after an answer uvicorn waits for bytes, not requests."""
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # it became a WebSocket
            return
        idle = self.idle_since is not None
        if idle and self._seen is self.cycle:
            self.transport.close()
            return
        self._seen = self.cycle if idle else self
        self._watch = self.loop.call_later(_LOOK_SECONDS, self._look)
