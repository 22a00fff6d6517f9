"""What a live client says: audio, or an object as JSON."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect

from sbkit.serve.errors import ApiError, invalid
from sbkit.serve.text import json_object

_LONGEST_TEXT = 1 << 14


class Wire:
    """Receives the messages of one client.

    Its idle clock runs from a call of :meth:`receive` to the next message alone: a client whose message is still being
    dealt with may have sent others long ago.
    """

    def __init__(self, websocket: WebSocket):
        self._websocket = websocket
        self._waits_since: float | None = None

    async def receive(self) -> bytes | dict[str, Any]:
        """Wait for the next message; raises ``WebSocketDisconnect`` at the end."""
        self._waits_since = time.monotonic()
        message = await self._websocket.receive()
        self._waits_since = None
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        if message.get("bytes") is not None:
            return message["bytes"]
        return _parsed(message["text"])

    async def first(self, seconds: float) -> bytes | dict[str, Any]:
        """Wait for the first message."""
        try:
            return await asyncio.wait_for(self.receive(), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise _idle(seconds) from None

    async def watch(self, seconds: float) -> None:
        """Raise ``ApiError`` 408 once the next message was waited for so long; one clock for all costs nothing."""
        while (left := seconds - self._waited) > 0:
            await asyncio.sleep(left)
        raise _idle(seconds)

    @property
    def _waited(self) -> float:
        return 0.0 if self._waits_since is None else time.monotonic() - self._waits_since


def _parsed(text: str) -> dict[str, Any]:
    if len(text) > _LONGEST_TEXT:
        raise invalid("the text message is too long")
    return json_object(text, "a text message")


def _idle(seconds: float) -> ApiError:
    return ApiError(408, f"nothing was received for {seconds:g} s", code="idle")
