"""Answers that are sent while they are made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_SLOW_READER_SECONDS = 60.0  # a client that takes longer to read a part is dropped


class Cut(Exception):
    """The rest of an answer can't be made, and its client has to notice."""


class Streamed(Response):
    """Response that streams parts and always releases the request's place at the end.

    Where making them raises ``Cut``, the connection is closed without the answer's end, so that no client takes a part
    for the whole.
    """

    def __init__(self, media_type: str, parts: AsyncGenerator[bytes, None], stay: contextlib.ExitStack):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._parts, self._stay = parts, stay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stay:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async with contextlib.aclosing(self._parts) as parts:
                    async for each in parts:
                        message = {"type": "http.response.body", "body": each, "more_body": True}
                        await asyncio.wait_for(send(message), _SLOW_READER_SECONDS)
            except Cut:
                return
            await send({"type": "http.response.body", "body": b""})
