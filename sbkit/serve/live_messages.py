"""The messages of a live session: those of its client, with a clock for silence, and those that wait to be sent."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.lines import LineMessages
from sbkit.serve.errors import ApiError, invalid
from sbkit.serve.live_recogniser import Update
from sbkit.serve.text import parse_object

#: A message in JSON, to or from a client.
Message = dict[str, Any]  # values of several types
#: Characters of a client's text message.
_MAX_TEXT = 1 << 14
#: Messages that may wait for a client who doesn't read.
MAX_MESSAGES = 64


class MessageReader:
    """Receives the messages of one client.

    Its idle clock runs only during :meth:`receive`: while a message is being processed, others may be waiting already.
    """

    def __init__(self, websocket: WebSocket):
        self._websocket = websocket
        self._waits_since: float | None = None  # None: a message is being processed

    async def receive(self) -> bytes | Message:
        """Wait for the next message; raises ``WebSocketDisconnect`` at the end."""
        self._waits_since = time.monotonic()
        message = await self._websocket.receive()
        self._waits_since = None
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        if message.get("bytes") is not None:
            return message["bytes"]
        if len(message["text"]) > _MAX_TEXT:
            raise invalid("invalid_message", f"a text message may have at most {_MAX_TEXT} characters")
        return parse_object(message["text"], "a text message")

    async def watch(self, seconds: float) -> None:
        """Raise ``ApiError`` 408 if no message comes for ``seconds``; cheaper than a timeout per message."""
        seconds_left = seconds
        while seconds_left > 0:
            await asyncio.sleep(seconds_left)
            if self._waits_since is None:
                seconds_left = seconds
            else:
                seconds_left = self._waits_since + seconds - time.monotonic()
        raise idle_error(seconds)


def idle_error(seconds: float) -> ApiError:
    """Make the error of a client who sent nothing for so long."""
    return ApiError(408, "idle", f"nothing was received for {seconds:g} s")


class SendQueue:
    """Makes the messages of a session, and sends them one after the other.

    A waiting partial is replaced by the next, so that a client who was slow for a while gets the newest. If a client
    doesn't read at all, ``put`` raises ``ApiError`` 408.
    """

    def __init__(self, vocabulary: Vocabulary, send: Callable[[Message], Awaitable[None]]):
        self._line_messages = LineMessages(vocabulary.text)
        self._send = send
        self._waiting: deque[Message] = deque()
        self._changed = asyncio.Event()
        self._ended = False

    def put(self, update: Update) -> None:
        """Queue finished lines, and the current line if it changed."""
        for line in update.lines:
            message = self._line_messages.message(line)
            if message is None:
                continue
            if not line.complete:
                end = round(update.seconds, 3)
                message = message | {"start": message.get("start", end), "heard": end}
            self._add(message)

    def end(self, last: Message) -> None:
        """Send a last message; :meth:`run` ends after it."""
        self._add(last)
        self._ended = True

    async def run(self) -> None:
        """Send messages as they come, until the last one is sent."""
        while True:
            while self._waiting:
                await self._send(self._waiting.popleft())
            if self._ended:
                return
            self._changed.clear()
            await self._changed.wait()

    def _add(self, message: Message) -> None:
        if self._waiting and self._waiting[-1]["type"] == "partial":
            self._waiting.pop()  # the next message replaces it
        if len(self._waiting) >= MAX_MESSAGES:
            raise ApiError(408, "slow_client", f"the client doesn't read its messages: {MAX_MESSAGES} are waiting")
        self._waiting.append(message)
        self._changed.set()
