"""One live session: audio of a client is received, recognised and answered at the same time, until either side ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import NamedTuple

from starlette.websockets import WebSocket

from sbkit.serve.audio_buffer import AudioBuffer
from sbkit.serve.clients import address
from sbkit.serve.errors import ApiError, invalid, too_late
from sbkit.serve.limits import Limits
from sbkit.serve.live_messages import Message, MessageReader, SendQueue
from sbkit.serve.live_recogniser import live_recogniser
from sbkit.serve.served_kinds import ServedRecogniser

#: Seconds of audio that may wait to be recognised; beyond that the client has to wait.
_MAX_BACKLOG_SECONDS = 5.0
#: A client that takes longer to read the last messages is dropped.
_SLOW_READER_SECONDS = 60.0
#: Codes with which a WebSocket is closed.
_NORMAL = 1000
_GOING_AWAY = 1001


class SessionStart(NamedTuple):
    """What the first message of a session names."""

    served: ServedRecogniser
    rate: int
    """Samples per second that the client sends."""
    chunk_ms: int | None
    """Milliseconds of a chunk; None: the model's default, or it has no streaming graph."""


class LiveSession:
    """Transcribes the speech of one client.

    reader : of the client's messages, after the first
    start : the first message
    """

    def __init__(self, websocket: WebSocket, reader: MessageReader, start: SessionStart, limits: Limits):
        served = start.served
        self.served = served
        self._websocket = websocket
        self._reader = reader
        self._limits = limits
        self._buffer = AudioBuffer(start.rate, served.config.sample_rate)
        self._recogniser = live_recogniser(served, start.chunk_ms, limits.request_seconds, address(websocket.scope))
        self._send_queue = SendQueue(served.vocabulary, websocket.send_json)
        self._ready: Message = {
            "type": "ready", "model": served.name, "sample_rate": start.rate,
            "chunk_seconds": self._recogniser.chunk_seconds, "ahead_seconds": self._recogniser.ahead_seconds}
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[object]] = []

    @property
    def seconds(self) -> float:
        """Seconds of the audio that was received."""
        return self._buffer.seconds

    def end(self) -> None:
        """Finish soon, as if the client had sent "stop", because the server stops."""
        self._stop.set()

    async def run(self) -> None:
        """Run until the client sends "stop" or :meth:`end` is called, and send the whole transcript.

        All audio that was received by then is in it; a client that goes on elsewhere begins at ``duration``.
        """
        await self._websocket.send_json(self._ready)
        publishing = self._start(self._publish())
        sending = self._start(self._send_queue.run())

        server_stops = await self._receive_until_end(publishing, sending)
        self._recogniser.feed(self._buffer.take(last=True))
        self._recogniser.finish()
        if not await _wait_for_first(publishing, sending, seconds=self._limits.request_seconds):
            raise too_late(self._limits.request_seconds)

        last_message: Message = {"type": "done", "duration": round(self.seconds, 3)}
        if server_stops:
            last_message["reason"] = "stopping"
        self._send_queue.end(last_message)
        if not await _wait_for_first(sending, seconds=_SLOW_READER_SECONDS):
            raise ApiError(408, "slow_client",
                           f"the client didn't read its last messages within {_SLOW_READER_SECONDS:g} s")
        await self._websocket.close(_GOING_AWAY if server_stops else _NORMAL)

    async def _receive_until_end(self, *others: asyncio.Task[object]) -> bool:
        """Receive audio until the client or the server ends it; return whether it was the server.

        others : tasks that run meanwhile, whose error ends the session
        """
        receiving = self._start(self._receive())
        watching = self._start(self._reader.watch(self._limits.idle_seconds))
        stopping = self._start(self._stop.wait())
        await _wait_for_first(receiving, stopping, watching, *others)
        server_stops = not receiving.done()
        for task in (receiving, stopping, watching):
            task.cancel()
        return server_stops

    def close(self) -> None:
        """Cancel everything that still runs."""
        for task in self._tasks:
            task.cancel()
        self._recogniser.close()

    def _start(self, coroutine: Coroutine[object, None, object]) -> asyncio.Task[object]:
        task = asyncio.create_task(coroutine)
        # ``run`` raises the first error. Those of other tasks are retrieved here, so that asyncio doesn't log them.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._tasks.append(task)
        return task

    async def _receive(self) -> None:
        """Feed the recogniser with what the client sends, until it sends "stop"."""
        while True:
            message = await self._reader.receive()
            if isinstance(message, bytes):
                await self._add_audio(message)
            elif message.get("type") == "stop":
                return
            elif message.get("type") == "start":
                raise invalid("invalid_message", 'a session keeps the model, sample rate and chunk of its first '
                              '"start": after that, send binary frames and {"type": "stop"}', "type")
            else:
                raise invalid("invalid_message", 'after "start", send binary frames of audio and {"type": "stop"}')

    async def _add_audio(self, frame: bytes) -> None:
        """Add a frame, and feed the recogniser once there is enough for its next step."""
        self._buffer.add(frame)
        if self._buffer.samples >= self._recogniser.wanted:
            self._recogniser.feed(self._buffer.take())
            await self._recogniser.catch_up(_MAX_BACKLOG_SECONDS)

    async def _publish(self) -> None:
        """Queue messages for what is recognised, until all of it is."""
        while (update := await self._recogniser.next_update()) is not None:
            self._send_queue.put(update)


async def _wait_for_first(*tasks: asyncio.Task[object], seconds: float | None = None) -> bool:
    """Wait until one of them is done, and raise its error if it failed; False after a timeout."""
    ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
    return bool(ended)
