"""Live transcription over a WebSocket: words appear during speech and become final at pauses; memory is bounded.

The client sends one JSON text, then binary frames of 16-bit little-endian mono PCM, then a JSON text:

    {"type": "start", "model": "NAME", "sample_rate": 48000, "chunk_ms": 320}     chunk_ms may be left out
    <binary>, <binary>, ...
    {"type": "stop"}

The server sends JSON texts; times are seconds from the first sample:

    {"type": "ready", "model": "NAME", "sample_rate": 48000, "chunk_seconds": 0.32, "ahead_seconds": 0.16}
                                                                      both null: no streaming graph
    {"type": "partial", "start": 3.1, "text": "...", "settled": "...", "heard": 4.8}   replaces the last partial
    {"type": "final", "start": 3.1, "end": 5.6, "text": "...", "words": [{"word", "start", "end", "confidence"}]}
    {"type": "done", "duration": 61.2}                                after "stop"; then it closes
    {"type": "done", "duration": 61.2, "reason": "stopping"}          the server stops: go on elsewhere from duration
    {"type": "error", "error": {"message", "type", "param", "code"}}  then it closes
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from sbkit.errors import shown
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.lines import LineMessages
from sbkit.infer.samples import Resampler, as_floats, check_rate, from_pcm
from sbkit.infer.sound_sources import FileSniffer
from sbkit.serve.access import REQUEST_ID
from sbkit.serve.clients import Shares, address
from sbkit.serve.errors import ApiError, failed, invalid, refused_for, too_late, unsupported
from sbkit.serve.limits import Limits
from sbkit.serve.live_recogniser import Update, live_recogniser
from sbkit.serve.metrics import Metrics
from sbkit.serve.registry import Registry
from sbkit.serve.served_kinds import ServedRecogniser
from sbkit.serve.text import parse_object

_MAX_BACKLOG_SECONDS = 5.0  # of audio that is not recognised yet; beyond that the client has to wait
_SLOW_READER_SECONDS = 60.0  # a client that takes longer to read the last messages is dropped
_NORMAL, _GOING_AWAY, _POLICY, _INTERNAL = 1000, 1001, 1008, 1011  # close codes of a WebSocket


class LiveSession:
    """Transcribes the speech of one client.

    reader : of the client's messages, after the first
    served, rate, chunk_ms : what the first message named
    """

    def __init__(self, websocket: WebSocket, reader: MessageReader, served: ServedRecogniser, rate: int,
                 chunk_ms: int | None, limits: Limits):
        self.served = served
        self._websocket = websocket
        self._reader = reader
        self._limits = limits
        self._buffer = AudioBuffer(rate, served.config.sample_rate)
        self._recogniser = live_recogniser(served, chunk_ms, limits.request_seconds, address(websocket.scope))
        self._send_queue = SendQueue(served.vocabulary, websocket.send_json)
        self._ready = {"type": "ready", "model": served.name, "sample_rate": rate,
                       "chunk_seconds": self._recogniser.chunk_seconds, "ahead_seconds": self._recogniser.ahead_seconds}
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def seconds(self) -> float:
        return self._buffer.seconds

    def end(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Run until the client sends "stop" or :meth:`end` is called, and send the whole transcript.

        All audio that was received by then is in it; a client that goes on elsewhere begins at ``duration``.
        """
        await self._websocket.send_json(self._ready)
        publishing = self._start(self._publish())
        sending = self._start(self._send_queue.run())
        receiving = self._start(self._receive())
        watching = self._start(self._reader.watch(self._limits.idle_seconds))
        stopping = self._start(self._stop.wait())
        await _wait_for_first(receiving, stopping, watching, publishing, sending)
        server_stops = not receiving.done()
        for task in (receiving, stopping, watching):
            task.cancel()

        self._recogniser.feed(self._buffer.take(last=True))
        self._recogniser.finish()
        if not await _wait_for_first(publishing, sending, seconds=self._limits.request_seconds):
            raise too_late(self._limits.request_seconds)
        last_message: dict[str, Any] = {"type": "done", "duration": round(self.seconds, 3)}
        if server_stops:
            last_message["reason"] = "stopping"
        self._send_queue.end(last_message)
        if not await _wait_for_first(sending, seconds=_SLOW_READER_SECONDS):
            raise ApiError(408, f"the client didn't read its last messages within {_SLOW_READER_SECONDS:g} s",
                           code="slow_client")
        await self._websocket.close(_GOING_AWAY if server_stops else _NORMAL)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._recogniser.close()

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:  # its result is never read
        task = asyncio.create_task(coroutine)
        # ``run`` raises the first error. Those of other tasks are retrieved here, so that asyncio doesn't log them.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._tasks.append(task)
        return task

    async def _receive(self) -> None:
        buffer, recogniser = self._buffer, self._recogniser
        while True:
            message = await self._reader.receive()
            if isinstance(message, bytes):
                buffer.add(message)
                if buffer.samples >= recogniser.wanted:
                    recogniser.feed(buffer.take())
                    await recogniser.catch_up(_MAX_BACKLOG_SECONDS)
            elif message.get("type") == "stop":
                return
            elif message.get("type") == "start":
                raise invalid('a session keeps the model, sample rate and chunk of its first "start": after that, send '
                              'binary frames and {"type": "stop"}', "type")
            else:
                raise invalid('after "start", send binary frames of audio and {"type": "stop"}')

    async def _publish(self) -> None:
        while (update := await self._recogniser.next_update()) is not None:
            self._send_queue.put(update)


async def _wait_for_first(*tasks: asyncio.Task[Any], seconds: float | None = None) -> bool:
    """Wait until one of them is done, and raise its error if it failed; False after a timeout."""
    ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
    return bool(ended)


#: Messages that may wait for a client who doesn't read.
MAX_MESSAGES = 64


class SendQueue:
    """Makes the messages of a session, and sends them one after the other.

    A waiting partial is replaced by the next, so that a client who was slow for a while gets the newest. If a client
    doesn't read at all, ``put`` raises ``ApiError`` 408.
    """

    def __init__(self, vocabulary: Vocabulary, send: Callable[[dict[str, Any]], Awaitable[None]]):
        self._messages, self._send = LineMessages(vocabulary.text), send
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = asyncio.Event()
        self._ended = False

    def put(self, update: Update) -> None:
        """Queue finished lines, and the current line if it changed."""
        for line in update.lines:
            message = self._messages.message(line)
            if message is None:
                continue
            if not line.complete:
                end = round(update.seconds, 3)
                message = message | {"start": message.get("start", end), "heard": end}
            self._add(message)

    def end(self, last: dict[str, Any]) -> None:
        """Send a last message; :meth:`run` ends after it."""
        self._add(last)
        self._ended = True

    async def run(self) -> None:
        while True:
            while self._waiting:
                await self._send(self._waiting.popleft())
            if self._ended:
                return
            self._changed.clear()
            await self._changed.wait()

    def _add(self, message: dict[str, Any]) -> None:
        if self._waiting and self._waiting[-1]["type"] == "partial":
            self._waiting.pop()  # the next message replaces it
        if len(self._waiting) >= MAX_MESSAGES:
            raise ApiError(408, f"the client doesn't read its messages: {MAX_MESSAGES} are waiting", code="slow_client")
        self._waiting.append(message)
        self._changed.set()


_MAX_TEXT = 1 << 14  # characters


class MessageReader:
    """Receives the messages of one client.

    Its idle clock runs only during :meth:`receive`: while a message is being processed, others may be waiting already.
    """

    def __init__(self, websocket: WebSocket):
        self._websocket = websocket
        self._waits_since: float | None = None  # None: a message is being processed

    async def receive(self) -> bytes | dict[str, Any]:
        """Wait for the next message; raises ``WebSocketDisconnect`` at the end."""
        self._waits_since = time.monotonic()
        message = await self._websocket.receive()
        self._waits_since = None
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        if message.get("bytes") is not None:
            return message["bytes"]
        if len(message["text"]) > _MAX_TEXT:
            raise invalid("the text message is too long")
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
        raise _idle(seconds)


def _idle(seconds: float) -> ApiError:
    return ApiError(408, f"nothing was received for {seconds:g} s", code="idle")


_MAX_FRAME_SECONDS = 10.0


class AudioBuffer:
    """Keeps frames as received until the samples are taken, so that a packet of 20 ms costs little.

    rate : samples per second of the client
    model_rate : samples per second of the model
    """

    def __init__(self, rate: int, model_rate: int):
        self._rate = rate
        self._model_rate = model_rate
        self._max_bytes = int(2 * rate * _MAX_FRAME_SECONDS)
        self._resampler = Resampler(rate, model_rate)
        self._sniffer = FileSniffer()
        self._frames: list[bytes] = []
        self._received = self._taken = 0  # bytes

    @property
    def seconds(self) -> float:
        return self._received / 2 / self._rate

    @property
    def samples(self) -> float:
        """About how many samples at the model's rate :meth:`take` would return."""
        return (self._received - self._taken) / 2 * self._model_rate / self._rate

    def add(self, frame: bytes) -> None:
        """Add a frame of the client; raises ``ApiError`` for one that can't be audio."""
        if not frame:
            raise invalid("a frame of audio is empty: send none while there is no audio", code="empty_frame")
        kind = self._sniffer.kind(frame)
        if kind is not None:
            raise invalid(f"the audio is a file ({kind}), but must be raw 16-bit samples: send a file to "
                          "/v1/audio/transcriptions", code="invalid_audio")
        if len(frame) % 2:
            raise invalid("a frame of audio must be 16-bit samples, so an even number of bytes")
        if len(frame) > self._max_bytes:
            raise invalid(f"a frame of audio must be shorter than {_MAX_FRAME_SECONDS:g} s")
        self._frames.append(frame)
        self._received += len(frame)

    def take(self, last: bool = False) -> np.ndarray:
        """Return the samples [S] since the last call, float32; ``last``: nothing comes after them."""
        pcm = b"".join(self._frames)
        self._frames = []
        self._taken = self._received
        return self._resampler(as_floats(from_pcm(pcm)), last)


PROTOCOL = "sbkit.live"
_log = logging.getLogger(__name__)
_START_FIELDS = frozenset({"type", "model", "sample_rate", "chunk_ms"})
_START_SECONDS = 10.0
_ERROR_SECONDS = 5.0  # to send an error to a client who may not read it


class LiveSessions:
    """All live sessions of the server."""

    def __init__(self, limits: Limits, metrics: Metrics):
        self._limits, self._metrics = limits, metrics
        self._shares = Shares(limits.max_live, limits.client_share)
        self.sessions: set[LiveSession] = set()
        """Those that are open."""
        self._ending = False

    @property
    def active(self) -> int:
        return self._shares.active

    def end(self) -> None:
        """Ask all sessions to finish, as if their clients had sent "stop"; refuse new ones."""
        self._ending = True
        for session in self.sessions:
            session.end()

    async def session(self, websocket: WebSocket, registry: Registry) -> None:
        """Run a session in a slot of its client; raises ``ApiError`` 429 before it begins if there is none."""
        with self._shares.slot(address(websocket.scope), "live sessions", 30):
            offered = websocket.scope.get("subprotocols", [])
            await websocket.accept(subprotocol=PROTOCOL if PROTOCOL in offered else None)
            session = None
            try:
                reader = MessageReader(websocket)
                served, rate, chunk_ms = await _start(reader, registry)
                session = LiveSession(websocket, reader, served, rate, chunk_ms, self._limits)
                self.sessions.add(session)
                if self._ending:
                    session.end()
                await session.run()
            except WebSocketDisconnect:
                pass
            except ApiError as error:
                self._metrics.refused.labels(error.code or error.status).inc()
                await _send_error(websocket, error, _POLICY)
            except Exception as error:
                _log.exception("session %s failed", websocket.scope[REQUEST_ID])
                await _send_error(websocket, failed(websocket.scope[REQUEST_ID], error), _INTERNAL)
            finally:
                if session is not None:
                    session.close()
                    self.sessions.discard(session)
                    self._metrics.audio.labels(session.served.name).inc(session.seconds)


async def _send_error(websocket: WebSocket, error: ApiError, code: int) -> None:
    async def send() -> None:
        await websocket.send_json({"type": "error", **error.body})
        await websocket.close(code, error.code or "")

    with contextlib.suppress(RuntimeError, WebSocketDisconnect, asyncio.TimeoutError, TimeoutError):  # it may be closed
        await asyncio.wait_for(send(), _ERROR_SECONDS)


async def _start(reader: MessageReader, registry: Registry) -> tuple[ServedRecogniser, int, int | None]:
    """Receive the first message, and return the model, the sample rate and the milliseconds of a chunk."""
    try:
        first = await asyncio.wait_for(reader.receive(), _START_SECONDS)
    except (asyncio.TimeoutError, TimeoutError):
        raise _idle(_START_SECONDS) from None
    if isinstance(first, bytes) or first.get("type") != "start":
        raise invalid('the first message must be {"type": "start", "model": NAME, "sample_rate": HERTZ}')
    unknown = sorted(set(first) - _START_FIELDS)
    if unknown:
        raise unsupported(unknown, _START_FIELDS)
    name = first.get("model")
    if not isinstance(name, (str, type(None))):
        raise invalid(f"model must be a name, not {shown(name)}", "model")
    served = registry.working(name, ServedRecogniser)
    chunk_ms = first.get("chunk_ms")
    if served.streams is not None:
        with refused_for("chunk_ms"):
            served.streams.frames_of(chunk_ms)
    elif chunk_ms is not None:
        raise invalid(f"the model {served.name} has no streaming graph, so no chunks to choose from: leave out "
                      "chunk_ms", "chunk_ms")
    with refused_for("sample_rate"):
        rate = check_rate(first.get("sample_rate"))
    return served, rate, chunk_ms
