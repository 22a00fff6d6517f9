"""What a live session has to tell its client, who may be slow to read it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sbkit.decode.spans import Word
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.lines import final
from sbkit.serve.errors import ApiError
from sbkit.serve.live_recogniser import News

#: Messages that may wait for a client who doesn't read.
MAX_MESSAGES = 64


class SendQueue:
    """Makes the messages of a session, and sends them one after the other.

    A partial that waits is replaced by the next, so that a client who was slow for a while gets the newest. One who
    doesn't read at all is told nothing more: ``put`` raises ``ApiError`` 408.
    """

    def __init__(self, vocabulary: Vocabulary, send: Callable[[dict[str, Any]], Awaitable[None]]):
        self._vocabulary, self._send = vocabulary, send
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = asyncio.Event()
        self._shown = ("", "")
        self._ended = False

    def put(self, news: News) -> None:
        """Tell lines that are over, and the line that goes on if it changed."""
        for line in news.lines:
            self._add(final(line, self._text(line)))
            self._shown = ("", "")
        shown = self._text(news.settled), self._text([*news.settled, *news.partial])
        if shown != self._shown:
            self._add({"type": "partial", "start": round(news.start, 3), "text": shown[1], "settled": shown[0],
                       "heard": round(news.heard, 3)})
            self._shown = shown

    def end(self, last: dict[str, Any]) -> None:
        """Send a last message; :meth:`run` ends after it."""
        self._add(last)
        self._ended = True

    async def run(self) -> None:
        """Send what there is to tell, to the end."""
        while True:
            while self._waiting:
                await self._send(self._waiting.popleft())
            if self._ended:
                return
            self._changed.clear()
            await self._changed.wait()

    def _add(self, message: dict[str, Any]) -> None:
        if self._waiting and self._waiting[-1]["type"] == "partial":
            self._waiting.pop()  # what follows says more
        if len(self._waiting) >= MAX_MESSAGES:
            raise ApiError(408, f"the client doesn't read: {MAX_MESSAGES} messages wait for it", code="slow_client")
        self._waiting.append(message)
        self._changed.set()

    def _text(self, words: Sequence[Word]) -> str:
        return self._vocabulary.text(words)
