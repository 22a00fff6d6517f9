"""Live transcription over a WebSocket: words appear during speech and settle at pauses; memory is bounded.

The client sends one JSON text, then binary frames of 16-bit little-endian mono PCM, then a JSON text:

    {"type": "start", "model": "NAME", "sample_rate": 48000}
    <binary>, <binary>, ...
    {"type": "stop"}

The server sends JSON texts; times are seconds from the first sample:

    {"type": "ready", "model": "NAME", "sample_rate": 48000}
    {"type": "partial", "start": 3.1, "text": "..."}                  what may still change; replaces the last one
    {"type": "final", "start": 3.1, "end": 5.6, "text": "...", "words": [{"word", "start", "end", "confidence"}]}
    {"type": "done", "duration": 61.2}                                after "stop"; then it closes
    {"type": "error", "error": {"message", "type", "param", "code"}}  then it closes
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import soxr
from fastapi import WebSocket, WebSocketDisconnect

from sbkit.decode.spans import Word
from sbkit.infer.assembly import words
from sbkit.infer.transcript import PAUSE_SECONDS
from sbkit.serve.clients import Shares
from sbkit.serve.errors import ApiError, busy, failed, invalid, too_late
from sbkit.serve.gate import REQUEST_ID
from sbkit.serve.job import Job
from sbkit.serve.limits import Limits
from sbkit.serve.metrics import Metrics
from sbkit.serve.registry import Registry, ServedModel
from sbkit.serve.tail import Settlement, Tail

PROTOCOL = "sbkit.live"
_log = logging.getLogger(__name__)
_MIN_RATE, _MAX_RATE = 8_000, 192_000
_START_SECONDS = 10.0
_BEHIND_SECONDS = 5.0  # of unprocessed audio; beyond that the client has to wait
_LONGEST_FRAME_SECONDS = 10.0
_LONGEST_TEXT = 1 << 14
_POLICY, _INTERNAL = 1008, 1011  # close codes of a WebSocket


class Floor:
    """All live sessions of the server."""

    def __init__(self, limits: Limits, metrics: Metrics):
        self._limits, self._metrics = limits, metrics
        self._shares = Shares(limits.max_live, limits.client_share)
        self.inside = 0
        """The current number of sessions."""
        self._sessions: set[_Session] = set()
        self._ending = False

    def end(self) -> None:
        """Ask all sessions to finish, as if their clients had sent "stop"; refuse new ones."""
        self._ending = True
        for session in self._sessions:
            session.end()

    def place(self, client: str | None) -> contextlib.AbstractContextManager[None]:
        """Hold a place for one session of a client; raises ``ApiError`` 429 if there is none."""
        if self.inside >= self._limits.max_live:
            raise busy(f"{self.inside} live sessions are already open", 30)
        share = contextlib.ExitStack()
        share.enter_context(self._shares.place(client, "live sessions"))
        self.inside += 1
        return self._leaving(share)

    @contextlib.contextmanager
    def _leaving(self, share: contextlib.ExitStack) -> Iterator[None]:
        with share:
            try:
                yield
            finally:
                self.inside -= 1

    async def session(self, websocket: WebSocket, registry: Registry) -> None:
        """Run a session from the handshake to the end."""
        offered = websocket.scope.get("subprotocols", [])
        await websocket.accept(subprotocol=PROTOCOL if PROTOCOL in offered else None)
        session = None
        try:
            served, rate = await _start(websocket, registry)
            session = _Session(websocket, served, rate, self._limits)
            self._sessions.add(session)
            if self._ending:
                session.end()
            await session.run()
        except WebSocketDisconnect:
            pass
        except ApiError as error:
            self._metrics.refused.add(reason=error.code or str(error.status))
            await _end(websocket, error, _POLICY)
        except Exception:
            _log.exception("session %s failed", websocket.scope[REQUEST_ID])
            await _end(websocket, failed(websocket.scope[REQUEST_ID]), _INTERNAL)
        finally:
            if session is not None:
                session.close()
                self._sessions.discard(session)
                self._metrics.audio.add(session.tail.seconds, model=session.served.name)


async def _end(websocket: WebSocket, error: ApiError, code: int) -> None:
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it may already be closed
        await websocket.send_json({"type": "error", **error.body})
        await websocket.close(code, error.code or "")


async def _start(websocket: WebSocket, registry: Registry) -> tuple[ServedModel, int]:
    """Receive the first message."""
    first = await _receive(websocket, _START_SECONDS)
    if isinstance(first, bytes) or first.get("type") != "start":
        raise invalid('the first message must be {"type": "start", "model": NAME, "sample_rate": HERTZ}')
    if not isinstance(first.get("model"), str):
        raise invalid("model must be a name", "model")
    served = registry.get(first["model"])
    served.check()
    rate = first.get("sample_rate")
    if not isinstance(rate, int) or not _MIN_RATE <= rate <= _MAX_RATE:
        raise invalid(f"sample_rate must be a whole number from {_MIN_RATE} to {_MAX_RATE}", "sample_rate")
    await websocket.send_json({"type": "ready", "model": served.name, "sample_rate": rate})
    return served, rate


async def _receive(websocket: WebSocket, seconds: float) -> bytes | dict[str, Any]:
    """Receive the next message: audio, or an object."""
    try:
        message = await asyncio.wait_for(websocket.receive(), seconds)
    except (asyncio.TimeoutError, TimeoutError):
        raise ApiError(408, f"nothing was received for {seconds:g} s", code="idle") from None
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    if message.get("bytes") is not None:
        return message["bytes"]
    if len(message["text"]) > _LONGEST_TEXT:
        raise invalid("the text message is too long")
    try:
        found = json.loads(message["text"])
    except (ValueError, RecursionError):
        raise invalid("a text message must be JSON") from None
    if not isinstance(found, dict):
        raise invalid("a text message must be a JSON object")
    return found


def stretches(settled: Sequence[Word]) -> list[list[Word]]:
    """Split words at pauses into lines, however many were settled at once."""
    lines: list[list[Word]] = []
    for word in settled:
        if lines and word.start - lines[-1][-1].end < PAUSE_SECONDS:
            lines[-1].append(word)
        else:
            lines.append([word])
    return lines


class _Session:
    """One live session. The audio is decoded at most once at a time; meanwhile more arrives."""

    def __init__(self, websocket: WebSocket, served: ServedModel, rate: int, limits: Limits):
        self.served, self._websocket, self._limits = served, websocket, limits
        own = served.config.sample_rate
        self.tail = Tail(own, served.frame_samples, served.chunk_seconds)
        self._rate = rate
        self._resampler = soxr.ResampleStream(rate, own, 1, dtype="float32", quality="MQ") if rate != own else None
        self._job = Job()
        self._look: asyncio.Task[bool] | None = None
        self._end = asyncio.get_running_loop().create_future()
        self._shown = ""

    def end(self) -> None:
        """Finish with the audio received so far."""
        if not self._end.done():
            self._end.set_result({"type": "stop"})

    async def run(self) -> None:
        """Run until the client sends "stop"."""
        while True:
            message = await self._next()
            if isinstance(message, bytes):
                self._hear(message)
                if self.tail.unseen_seconds > _BEHIND_SECONDS:
                    await self._looked()
                if self._look is None and self.tail.due:
                    self._look = asyncio.create_task(self._look_now())
            elif message.get("type") == "stop":
                break
            else:
                raise invalid('after "start", send binary frames of audio and {"type": "stop"}')
        await self._looked()
        self._hear(b"", last=True)
        while not await self._look_now(end=True):
            pass
        await self._websocket.send_json({"type": "done", "duration": round(self.tail.seconds, 3)})
        await self._websocket.close()

    def close(self) -> None:
        """Cancel all work of the session."""
        self._job.cancel()
        if self._look is not None:
            self._look.cancel()

    async def _next(self) -> bytes | dict[str, Any]:
        """Wait for the next message, from the client or from :meth:`end`; a failed decoding ends the session."""
        receiving = asyncio.ensure_future(_receive(self._websocket, self._limits.idle_seconds))
        try:
            while not receiving.done():
                waited = {receiving, self._end, *([] if self._look is None else [self._look])}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if self._look is not None and self._look.done():
                    await self._looked()
                if self._end.done():
                    return self._end.result()
            return receiving.result()
        finally:
            receiving.cancel()

    def _hear(self, data: bytes, last: bool = False) -> None:
        if len(data) % 2:
            raise invalid("a frame of audio must be 16-bit samples, so an even number of bytes")
        if len(data) > 2 * self._rate * _LONGEST_FRAME_SECONDS:
            raise invalid(f"a frame of audio must be shorter than {_LONGEST_FRAME_SECONDS:g} s")
        signal = np.frombuffer(data, dtype="<i2").astype(np.float32) / 32768.0
        if self._resampler is not None:
            signal = self._resampler.resample_chunk(signal, last=last)
        self.tail.add(signal)

    async def _looked(self) -> None:
        """Wait for the running decoding, and raise its error if it failed."""
        look, self._look = self._look, None
        if look is not None:
            await look

    async def _look_now(self, end: bool = False) -> bool:
        """Decode the tail, settle what can be settled and send both; returns whether that was the end."""
        signal, skip = self.tail.look()
        if not len(signal):
            return True
        last = end and not self.tail.unseen_seconds
        asking = asyncio.wrap_future(self._job.watch(self.served.batcher.submit(signal)))
        try:
            log_probs = await asyncio.wait_for(asking, self._limits.request_seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise too_late(self._limits.request_seconds) from None
        except Exception:
            self.served.check()  # raises for a broken device
            raise
        decoder, vocabulary = self.served.decoder, self.served.vocabulary
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            None, lambda: words(decoder.tokens([[decoder.keep(log_probs[skip:].copy())]])[0], vocabulary))
        await self._tell(self.tail.settle(found, len(signal), skip, last))
        return last

    async def _tell(self, settled: Settlement) -> None:
        text = self.served.vocabulary.text
        for stretch in stretches(settled.final):
            await self._websocket.send_json({
                "type": "final", "start": round(stretch[0].start, 3), "end": round(stretch[-1].end, 3),
                "text": text(stretch), "words": [
                    {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3),
                     "confidence": round(word.confidence, 4)} for word in stretch]})
            self._shown = ""
        partial = text(settled.partial)
        if partial != self._shown:
            await self._websocket.send_json({"type": "partial", "start": round(settled.start, 3), "text": partial})
            self._shown = partial
