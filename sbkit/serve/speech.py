"""Speaks a text sentence by sentence through the batcher, as bytes of a format that are sent on at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from sbkit.infer.sentences import Phrase
from sbkit.infer.sound_file import SoundStream
from sbkit.infer.speech import Speech, pauses, spoken
from sbkit.infer.voice_engine import SpeechInput, SpeechOutput
from sbkit.serve import replies
from sbkit.serve.errors import ApiError, failed
from sbkit.serve.metrics import Metrics
from sbkit.serve.replies import Cut
from sbkit.serve.speech_form import SpeechForm
from sbkit.serve.work import ClientDisconnected, RequestContext

_AHEAD = 2  # sentences of one text in flight: a long text must not fill all batches
_log = logging.getLogger(__name__)


@dataclass
class Usage:
    """What a text took: its symbols, and the frames of its sound."""

    symbols: int = 0
    frames: int = 0


async def sound(visit: RequestContext, ask: SpeechForm, metrics: Metrics) -> AsyncGenerator[bytes | Usage, None]:
    """Yield the bytes of a text's sound as they are ready, then what it took. A sentence is computed while the one
    before it is read, so that a slow reader takes no thread and little memory."""
    began, name = time.monotonic(), ask.served.name
    stream, usage = SoundStream(ask.kind, ask.served.config.sample_rate), Usage()
    work = visit.work(ask.served.batcher.backlog)
    coming = deque(pauses(iter(ask.pieces), ask.speed))
    computing: deque[tuple[Phrase, float, asyncio.Future[Any]]] = deque()
    first = True
    try:
        work.grow(sum(len(piece.ids) for piece in ask.pieces) / ask.speed)
        while coming or computing:
            while coming and len(computing) < _AHEAD:
                piece, pause = coming.popleft()
                future = ask.served.batcher.submit(SpeechInput(piece.ids, ask.speaker, ask.speed), visit.job.client)
                computing.append((piece, pause, asyncio.wrap_future(visit.job.watch(future))))
            piece, pause, waiting = computing.popleft()
            try:
                found: SpeechOutput = await visit.met(waiting)
            except Exception:
                ask.served.check()  # raises for a broken device
                raise
            speech = spoken(piece, found, ask.served.config, pause)
            data = await visit.met(visit.step(_encoded, stream, speech, not (coming or computing)))
            usage.symbols += len(piece.ids)
            work.done(usage.symbols / ask.speed)
            usage.frames += int(found.frames.sum())
            metrics.spoken.labels(name).inc(speech.seconds)
            if data:
                if first:
                    metrics.first_audio.labels(name).observe(time.monotonic() - began)
                    first = False
                yield data
        yield usage
    finally:
        work.close()
        for _, _, waiting in computing:
            _forget(waiting)


def _forget(future: asyncio.Future[Any]) -> None:
    """Cancel a future, or take an error from it that nobody waits for."""
    if not future.cancel() and not future.cancelled():
        future.exception()


def _encoded(stream: SoundStream, speech: Speech, last: bool) -> bytes:
    stream.add(speech.samples)
    if last:
        stream.end()
    return stream.take()


def _part(each: bytes | Usage, sse: bool) -> bytes:
    """A part of an answer: bytes as they are, or an event; none for what only an event can say."""
    if isinstance(each, bytes):
        return replies.audio_delta(each) if sse else each
    return replies.audio_done(each.symbols, each.frames) if sse else b""


async def resumed(first: bytes | Usage, rest: AsyncGenerator[bytes | Usage, None], sse: bool, request: str,
                  metrics: Metrics) -> AsyncGenerator[bytes, None]:
    """Yield an answer whose first part is there: bytes, or events. An error is an event, or raises ``Cut``."""
    try:
        async with contextlib.aclosing(rest):
            if part := _part(first, sse):
                yield part
            async for each in rest:
                if part := _part(each, sse):
                    yield part
        return
    except ClientDisconnected:
        raise Cut from None
    except ApiError as error:
        found = error
        _log.warning("request %s was cut off: %s", request, error.message)
    except Exception as error:
        found = failed(request, error)
        _log.exception("request %s failed", request)
    metrics.cut.labels(found.code or found.status).inc()
    if not sse:
        raise Cut
    yield replies.event(found.body)
