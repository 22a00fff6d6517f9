"""One live session: a task that receives, one that hears, and one that sends from a queue; none waits for another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from fastapi import WebSocket

from sbkit.decode.spans import Word
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.lines import final
from sbkit.serve.clients import address
from sbkit.serve.errors import ApiError, invalid, too_late
from sbkit.serve.limits import Limits
from sbkit.serve.live_recogniser import News, live_recogniser
from sbkit.serve.registry import ServedModel
from sbkit.serve.wire import Intake, Wire

_BEHIND_SECONDS = 5.0  # of audio that was not heard yet; beyond that the client has to wait
_SLOW_READER_SECONDS = 60.0  # a client that takes longer to read the last messages is dropped


class LiveSession:
    """Hears one client to the end.

    Arguments
    ---------
    wire : the client, whose first message was received
    served, rate, chunk_ms : what it asked for
    """

    def __init__(self, websocket: WebSocket, wire: Wire, served: ServedModel, rate: int, chunk_ms: int | None,
                 limits: Limits):
        self.served = served
        self._websocket, self._wire, self._limits = websocket, wire, limits
        self._intake = Intake(rate, served.config.sample_rate)
        self._hearing = live_recogniser(served, chunk_ms, limits.request_seconds, address(websocket.scope))
        self._outbox = SendQueue(served.vocabulary, websocket.send_json)
        self._ready = {"type": "ready", "model": served.name, "sample_rate": rate,
                       "chunk_seconds": self._hearing.chunk_seconds, "ahead_seconds": self._hearing.ahead_seconds}
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def seconds(self) -> float:
        """The seconds received so far."""
        return self._intake.seconds

    def end(self) -> None:
        """Finish with the audio received so far."""
        self._stop.set()

    async def run(self) -> None:
        """Run until the client says "stop" or :meth:`end` is called, and tell all that was heard."""
        await self._websocket.send_json(self._ready)
        telling, sending = self._start(self._send_news()), self._start(self._outbox.run())
        receiving, watching = self._start(self._receive()), self._start(self._wire.watch(self._limits.idle_seconds))
        stopping = self._start(self._stopped())
        await _first(receiving, stopping, watching, telling, sending)
        for each in (receiving, stopping, watching):
            each.cancel()
        self._hearing.feed(self._intake.take(last=True))
        self._hearing.finish()
        if not await _first(telling, sending, seconds=self._limits.request_seconds):
            raise too_late(self._limits.request_seconds)
        self._outbox.end({"type": "done", "duration": round(self.seconds, 3)})
        if not await _first(sending, seconds=_SLOW_READER_SECONDS):
            raise ApiError(408, f"the client didn't read its last messages within {_SLOW_READER_SECONDS:g} s",
                           code="slow_client")
        await self._websocket.close()

    def close(self) -> None:
        """Cancel all work of the session."""
        for each in self._tasks:
            each.cancel()
        self._hearing.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the first error is told
        self._tasks.append(task)
        return task

    async def _stopped(self) -> None:
        await self._stop.wait()

    async def _receive(self) -> None:
        """Receive audio until "stop"."""
        intake, ears = self._intake, self._hearing
        while True:
            message = await self._wire.receive()
            if isinstance(message, bytes):
                intake.add(message)
                if intake.held >= ears.wanted:
                    ears.feed(intake.take())
                    await ears.catch_up(_BEHIND_SECONDS)
            elif message.get("type") == "stop":
                return
            elif message.get("type") == "start":
                raise invalid("a session has one model, sample rate and chunk, those that it began with: after "
                              '"start", send binary frames and {"type": "stop"}', "type")
            else:
                raise invalid('after "start", send binary frames of audio and {"type": "stop"}')

    async def _send_news(self) -> None:
        """Put what is heard into the outbox, to the end."""
        while (news := await self._hearing.news()) is not None:
            self._outbox.put(news)


async def _first(*tasks: asyncio.Task[None], seconds: float | None = None) -> bool:
    """Wait until one of them is done, and raise its error if it failed; False: none was in time."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for each in done:
        each.result()
    return bool(done)


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
