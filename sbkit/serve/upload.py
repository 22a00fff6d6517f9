"""Receives a request's body, which must arrive fast enough and fit in its room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any, Protocol

from fastapi import Request

from sbkit.serve.errors import too_slow
from sbkit.serve.limits import Limits


class SizeLimit(Protocol):
    """Room for what is received."""

    def grow(self, size: int) -> None:
        """Grow to this many bytes; raises ``ApiError`` if there is no room for them."""


class Upload:
    """Wraps a request; use :attr:`request` in its place.

    Arguments
    ---------
    held : its room, such as a disk reservation: the length that the request claims, or else what has arrived
    """

    def __init__(self, request: Request, limits: Limits, held: SizeLimit):
        self._receive, self._limits, self._held = request.receive, limits, held
        self._came, self._waited, self._whole = 0, 0.0, False
        held.grow(int(request.headers.get("content-length", "0")))
        self.request = Request(request.scope, self._next)

    async def _next(self) -> MutableMapping[str, Any]:
        """Receive the next message. The clock runs only while waiting for the client."""
        if self._whole:
            return await self._receive()
        least = self._limits.min_upload_kbs * 1024
        began = time.monotonic()
        try:
            message = await asyncio.wait_for(
                self._receive(), max(self._limits.upload_grace_seconds + self._came / least - self._waited, 0.01))
        except (asyncio.TimeoutError, TimeoutError):
            self._whole = True
            raise too_slow(f"arrives at less than {self._limits.min_upload_kbs:g} KB a second") from None
        self._waited += time.monotonic() - began
        self._came += len(message.get("body", b""))
        self._whole = not message.get("more_body")
        self._held.grow(self._came)
        return message
