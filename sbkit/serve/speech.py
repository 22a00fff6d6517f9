"""Synthesises a text phrase by phrase through the batcher, and streams it as bytes of an audio format."""

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
from sbkit.infer.voice import Speech, check_speed, pauses, speaker_of, spoken
from sbkit.infer.voice_engine import SpeechInput, SpeechOutput
from sbkit.serve import replies
from sbkit.serve.errors import ApiError, failed, invalid, refused_for, too_large, unsupported
from sbkit.serve.metrics import Metrics
from sbkit.serve.registry import Registry
from sbkit.serve.replies import CutOff
from sbkit.serve.request_context import ClientDisconnected, RequestContext
from sbkit.serve.served_kinds import ServedVoice
from sbkit.serve.text import decode_utf8, parse_object

MAX_CHARACTERS = 4096
_MAX_BYTES = 1 << 16  # of all these characters as JSON, each as two escapes
_FIELDS = ("input", "model", "voice", "response_format", "speed", "stream_format", "instructions", "skip_unknown")
_DEFAULT, _AUDIO, _SSE = "mp3", "audio", "sse"


@dataclass(frozen=True)
class SpeechForm:
    """A valid request.

    phrases : the whole text, cut for the voice
    kind : the format, one of ``sbkit.infer.sound_file.KINDS``
    sse : whether events are sent, otherwise bytes
    """

    served: ServedVoice
    phrases: list[Phrase]
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
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise invalid("invalid_body", "the body must be application/json with the fields model, input and voice")
    fields = parse_object(decode_utf8(await request.body(), "the body"), "the body")
    form: SpeechForm = await run_in_thread(_read, fields, registry())
    return form


def _read(fields: dict[str, Any], registry: Registry) -> SpeechForm:
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise unsupported(unknown, _FIELDS)
    served = registry.working(_text(fields, "model"), ServedVoice)
    text = _text(fields, "input", needed=True)
    if len(text) > MAX_CHARACTERS:
        raise invalid("string_above_max_length", f"input has {len(text)} characters, the limit is {MAX_CHARACTERS}: "
                      "send the text in parts", "input")
    voice = fields.get("voice")
    if isinstance(voice, dict) and set(voice) == {"id"}:
        voice = voice["id"]
    if not isinstance(voice, (str, type(None))):
        raise invalid("invalid_type", 'voice must be a name, or {"id": NAME}', "voice")
    with refused_for("voice"):
        speaker = speaker_of(served.config, voice)
    kind = _text(fields, "response_format") or _DEFAULT
    if kind not in kinds():
        raise invalid("unsupported_value", f"response_format {shown(kind)} is not available here; use one of "
                      f"{', '.join(kinds())}", "response_format")
    speed = fields.get("speed")
    with refused_for("speed"):
        speed = check_speed(1.0 if speed is None else speed)
    stream_format = _text(fields, "stream_format") or _AUDIO
    if stream_format not in (_AUDIO, _SSE):
        raise invalid("unsupported_value", f"stream_format {shown(stream_format)} must be {_AUDIO} or {_SSE}",
                      "stream_format")
    if _text(fields, "instructions"):
        raise invalid("unsupported_parameter", f"the model {served.name} can't follow instructions; leave them out",
                      "instructions")
    skip_unknown = fields.get("skip_unknown")
    if not isinstance(skip_unknown, (bool, type(None))):
        raise invalid("invalid_type", f"skip_unknown must be true or false, not {shown(skip_unknown)}", "skip_unknown")
    with refused_for("input"):
        phrases = list(PhraseReader(served.config, bool(skip_unknown)).read(text))
    return SpeechForm(served, phrases, speaker, kind, speed, stream_format == _SSE)


def _text(fields: dict[str, Any], name: str, needed: bool = False) -> str:
    value = fields.get(name)
    if value is None:
        if needed:
            raise invalid("missing_required_parameter", f"the field {name} is missing", name)
        return ""
    if not isinstance(value, str):
        raise invalid("invalid_type", f"{name} must be a text, not {shown(value)}", name)
    return value


_MAX_IN_FLIGHT = 2  # phrases of one text that are computed at once: a long text must not fill all batches
_log = logging.getLogger(__name__)


Usage = tuple[int, int]
"""The symbols of a text, and the frames of its speech."""


async def synthesise(context: RequestContext, form: SpeechForm, metrics: Metrics
                     ) -> AsyncGenerator[bytes | Usage, None]:
    """Yield the bytes of a text's speech as they are ready, then its usage.

    A phrase is computed while the client reads the one before, so a slow reader takes no thread and little memory.
    """
    started = time.monotonic()
    served = form.served
    stream = SoundStream(form.kind, served.config.sample_rate)
    work = context.work(served.batcher.backlog)
    pending = deque(pauses(iter(form.phrases), form.speed))  # each with the pause after it
    computing: deque[tuple[Phrase, float, asyncio.Future[Any]]] = deque()
    symbols = frames = 0
    first = True
    try:
        work.grow(sum(len(phrase.ids) for phrase in form.phrases) / form.speed)
        while pending or computing:
            while pending and len(computing) < _MAX_IN_FLIGHT:
                phrase, pause = pending.popleft()
                line = SpeechInput(phrase.ids, form.speaker, form.speed)
                submitted = served.batcher.submit(line, context.job.client, work)
                computing.append((phrase, pause, asyncio.wrap_future(context.job.watch(submitted))))

            phrase, pause, future = computing.popleft()
            with served.device_errors():
                output: SpeechOutput = await context.wait_for(future)
            speech = spoken(phrase, output, served.config, pause)
            last = not pending and not computing
            data = await context.wait_for(context.run_in_thread(_encode, stream, speech, last))

            symbols += len(phrase.ids)
            frames += int(output.frames.sum())
            work.done(symbols / form.speed)
            metrics.spoken.labels(served.name).inc(speech.seconds)
            if data:
                if first:
                    metrics.first_audio.labels(served.name).observe(time.monotonic() - started)
                    first = False
                yield data
        yield symbols, frames
    finally:
        work.close()
        for _, _, future in computing:
            if not future.cancel() and not future.cancelled():
                future.exception()  # retrieved, so that asyncio doesn't log it


def _encode(stream: SoundStream, speech: Speech, last: bool) -> bytes:
    stream.add(speech.samples)
    if last:
        stream.end()
    return stream.take()


def _part(result: bytes | Usage, sse: bool) -> bytes:
    """Make a part of a response, of bytes or of events; usage is sent only as an event."""
    if not sse:
        return result if isinstance(result, bytes) else b""
    if isinstance(result, bytes):
        return replies.event({"type": "speech.audio.delta", "audio": base64.b64encode(result).decode()})
    symbols, frames = result
    return replies.event({"type": "speech.audio.done", "usage": {
        "input_tokens": symbols, "output_tokens": frames, "total_tokens": symbols + frames}})


async def stream_body(first: bytes | Usage, rest: AsyncGenerator[bytes | Usage, None], sse: bool, request: str,
                      metrics: Metrics) -> AsyncGenerator[bytes, None]:
    """Yield a response as bytes or as events. An error is sent as an event, or raises ``CutOff``.

    first, rest : the results of ``synthesise``, the first of which was waited for
    request : its id
    """
    try:
        async with contextlib.aclosing(rest):
            part = _part(first, sse)
            if part:
                yield part
            async for result in rest:
                part = _part(result, sse)
                if part:
                    yield part
        return
    except ClientDisconnected:
        raise CutOff from None
    except ApiError as error:
        cause = error
        _log.warning("request %s was cut off: %s [%s]", request, error.message, error.code)
    except Exception as error:
        cause = failed(request, error)
        _log.exception("request %s failed", request)
    metrics.cut.labels(cause.code).inc()
    if not sse:
        raise CutOff
    yield replies.event(cause.body)
