"""Connections that ask for nothing, or take forever over it, are closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_LOOK_SECONDS = 15.0


class Impatient(H11Protocol):
    """uvicorn has no limit for the time that a request's headers take."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to watch."""
        super().connection_made(transport)
        self._seen: Any = self
        self._watch = self.loop.call_later(_LOOK_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended by itself."""
        self._watch.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Close what had no request in work for a whole turn; after an answer uvicorn waits for bytes, not requests."""
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # it became a WebSocket
            return
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._seen is self.cycle:
            self.transport.close()
            return
        self._seen = self.cycle if idle else self
        self._watch = self.loop.call_later(_LOOK_SECONDS, self._look)
