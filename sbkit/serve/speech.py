"""Synthesises a text sentence by sentence through the batcher, and streams it as bytes of an audio format."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from sbkit.errors import shown
from sbkit.infer.sentences import Phrase, PhraseReader
from sbkit.infer.sound_file import SoundStream, kinds
from sbkit.infer.symbols import UnknownCharacters, UnspeakableText
from sbkit.infer.voice import Speech, check_speed, pauses, speaker_of, spoken
from sbkit.infer.voice_engine import SpeechInput, SpeechOutput
from sbkit.serve import replies
from sbkit.serve.errors import ApiError, failed, invalid, refused_for, too_large, unsupported
from sbkit.serve.metrics import Metrics
from sbkit.serve.registry import Registry, ServedVoice
from sbkit.serve.replies import CutOff
from sbkit.serve.request_context import ClientDisconnected, RequestContext
from sbkit.serve.text import decode_utf8, parse_object

MAX_CHARACTERS = 4096
_MAX_BYTES = 1 << 16  # of all these characters as JSON, each as two escapes
_FIELDS = ("input", "model", "voice", "response_format", "speed", "stream_format", "instructions", "skip_unknown")
_DEFAULT, _AUDIO, _SSE = "mp3", "audio", "sse"


@dataclass(frozen=True)
class SpeechForm:
    """A valid request.

    pieces : the whole text in phrases for the voice
    kind : the format, one of ``sbkit.infer.sound_file.KINDS``
    sse : whether events are sent, otherwise bytes
    """

    served: ServedVoice
    pieces: list[Phrase]
    speaker: int
    kind: str
    speed: float
    sse: bool


def limit_size(size: int) -> None:
    """Raise ``ApiError`` 413 if a request has more bytes than are kept in memory."""
    if size > _MAX_BYTES:
        raise too_large(_MAX_BYTES, param=None)


async def read_request(request: Request, registry: Callable[[], Registry],
                       run_in_thread: Callable[..., Awaitable[Any]]) -> SpeechForm:
    """Read and check a request, its text in a thread."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise invalid("the body must be application/json with the fields model, input and voice")
    fields = parse_object(decode_utf8(await request.body(), "the body"), "the body")
    found: SpeechForm = await run_in_thread(_read, fields, registry())
    return found


def _read(fields: dict[str, Any], registry: Registry) -> SpeechForm:
    if unknown := sorted(set(fields) - set(_FIELDS)):
        raise unsupported(unknown, _FIELDS)
    served = registry.working(_text(fields, "model"), ServedVoice)
    text = _text(fields, "input", needed=True)
    if len(text) > MAX_CHARACTERS:
        raise invalid(f"input has {len(text)} characters, the limit is {MAX_CHARACTERS}: send the text in parts",
                      "input", "string_above_max_length")
    voice = fields.get("voice")
    if isinstance(voice, dict) and set(voice) == {"id"}:
        voice = voice["id"]
    if not isinstance(voice, (str, type(None))):
        raise invalid('voice must be a name, or {"id": NAME}', "voice")
    with refused_for("voice", "voice_not_found"):
        speaker = speaker_of(served.config, voice)
    kind = _text(fields, "response_format") or _DEFAULT
    if kind not in kinds():
        raise invalid(f"response_format {shown(kind)} is not available here; use one of {', '.join(kinds())}",
                      "response_format", "unsupported_value")
    with refused_for("speed"):
        speed = check_speed(1.0 if (given := fields.get("speed")) is None else given)
    streamed = _text(fields, "stream_format") or _AUDIO
    if streamed not in (_AUDIO, _SSE):
        raise invalid(f"stream_format {shown(streamed)} must be {_AUDIO} or {_SSE}", "stream_format",
                      "unsupported_value")
    if _text(fields, "instructions"):
        raise invalid(f"the model {served.name} can't follow instructions; leave them out",
                      "instructions", "unsupported_parameter")
    skip = fields.get("skip_unknown")
    if not isinstance(skip, (bool, type(None))):
        raise invalid(f"skip_unknown must be true or false, not {shown(skip)}", "skip_unknown")
    try:
        pieces = list(PhraseReader(served.config, bool(skip)).read(text))
    except UnspeakableText as error:
        code = "unknown_characters" if isinstance(error, UnknownCharacters) else "empty_input"
        raise invalid(str(error), "input", code) from None
    return SpeechForm(served, pieces, speaker, kind, speed, streamed == _SSE)


def _text(fields: dict[str, Any], name: str, needed: bool = False) -> str:
    value = fields.get(name)
    if value is None:
        if needed:
            raise invalid(f"the field {name} is missing", name)
        return ""
    if not isinstance(value, str):
        raise invalid(f"{name} must be a text, not {shown(value)}", name)
    return value


_MAX_IN_FLIGHT = 2  # sentences of one text in flight: a long text must not fill all batches
_log = logging.getLogger(__name__)


Usage = tuple[int, int]
"""The symbols of a text, and the frames of its speech."""


async def synthesise(context: RequestContext, form: SpeechForm, metrics: Metrics
                     ) -> AsyncGenerator[bytes | Usage, None]:
    """Yield the bytes of a text's speech as they are ready, then its usage. A sentence is computed while the one before
    it is read, so that a slow reader takes no thread and little memory."""
    began, name = time.monotonic(), form.served.name
    stream, symbols, frames = SoundStream(form.kind, form.served.config.sample_rate), 0, 0
    work = context.work(form.served.batcher.backlog)
    pending = deque(pauses(iter(form.pieces), form.speed))
    computing: deque[tuple[Phrase, float, asyncio.Future[Any]]] = deque()
    first = True
    try:
        work.grow(sum(len(piece.ids) for piece in form.pieces) / form.speed)
        while pending or computing:
            while pending and len(computing) < _MAX_IN_FLIGHT:
                piece, pause = pending.popleft()
                line = SpeechInput(piece.ids, form.speaker, form.speed)
                future = form.served.batcher.submit(line, context.job.client, work)
                computing.append((piece, pause, asyncio.wrap_future(context.job.watch(future))))
            piece, pause, waiting = computing.popleft()
            with form.served.device_errors():
                found: SpeechOutput = await context.wait_for(waiting)
            speech = spoken(piece, found, form.served.config, pause)
            data = await context.wait_for(context.run_in_thread(_encoded, stream, speech, not (pending or computing)))
            symbols += len(piece.ids)
            work.done(symbols / form.speed)
            frames += int(found.frames.sum())
            metrics.spoken.labels(name).inc(speech.seconds)
            if data:
                if first:
                    metrics.first_audio.labels(name).observe(time.monotonic() - began)
                    first = False
                yield data
        yield symbols, frames
    finally:
        work.close()
        for _, _, waiting in computing:
            if not waiting.cancel() and not waiting.cancelled():
                waiting.exception()  # retrieved, so that asyncio doesn't log it


def _encoded(stream: SoundStream, speech: Speech, last: bool) -> bytes:
    stream.add(speech.samples)
    if last:
        stream.end()
    return stream.take()


def _part(each: bytes | Usage, sse: bool) -> bytes:
    """A part of a response: the bytes, or an event; usage is sent only as an event."""
    if not sse:
        return each if isinstance(each, bytes) else b""
    if isinstance(each, bytes):
        return replies.event({"type": "speech.audio.delta", "audio": base64.b64encode(each).decode()})
    symbols, frames = each
    return replies.event({"type": "speech.audio.done", "usage": {
        "input_tokens": symbols, "output_tokens": frames, "total_tokens": symbols + frames}})


async def stream_body(first: bytes | Usage, rest: AsyncGenerator[bytes | Usage, None], sse: bool, request: str,
                  metrics: Metrics) -> AsyncGenerator[bytes, None]:
    """Yield a response, whose first part is there, as bytes or events. An error is an event, or raises ``CutOff``."""
    try:
        async with contextlib.aclosing(rest):
            if part := _part(first, sse):
                yield part
            async for each in rest:
                if part := _part(each, sse):
                    yield part
        return
    except ClientDisconnected:
        raise CutOff from None
    except ApiError as error:
        found = error
        _log.warning("request %s was cut off: %s", request, error.message)
    except Exception as error:
        found = failed(request, error)
        _log.exception("request %s failed", request)
    metrics.cut.labels(found.code or found.status).inc()
    if not sse:
        raise CutOff
    yield replies.event(found.body)
