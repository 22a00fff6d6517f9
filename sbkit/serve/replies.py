"""Transcripts in the formats of OpenAI's API, the events of streams, and streaming responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import zlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from sbkit.data import language_code
from sbkit.infer.transcript import FORMATS, Transcript

#: The text formats, and their names in ``sbkit.infer``.
_AS_TEXT = {"text": "txt", "srt": "srt", "vtt": "vtt"}
STREAM = "text/event-stream"
END_OF_STREAM = b"data: [DONE]\n\n"


def reply(transcript: Transcript, kind: str, granularities: Sequence[str], worth: float | None = None) -> Response:
    """Make the response to a request for a transcript.

    kind : its ``response_format``
    granularities : of a verbose one: ``segment``, ``word``
    worth : how much can be learnt from correcting it, for a server that keeps corrections
    """
    if kind in _AS_TEXT:
        media = "text/vtt" if kind == "vtt" else "text/plain"
        headers = {} if transcript.warning is None else {"x-warning": transcript.warning}
        return PlainTextResponse(FORMATS[_AS_TEXT[kind]](transcript), media_type=media, headers=headers)
    if kind == "json":
        return JSONResponse({"text": transcript.text, "usage": _usage(transcript), **_warning(transcript)})
    body = verbose(transcript, granularities)
    if worth is not None:
        body["worth_correcting"] = round(worth, 4)
    # Encoded piece by piece, because encoding hours of audio at once would block all threads.
    pieces = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(body)
    return Response("".join(pieces), media_type="application/json")


def verbose(transcript: Transcript, granularities: Sequence[str]) -> dict[str, Any]:
    """Make the body of ``verbose_json``."""
    body: dict[str, Any] = {
        "task": "transcribe", "language": transcript.language or language_code.UNKNOWN,
        "duration": round(transcript.duration, 3), "text": transcript.text, "usage": _usage(transcript),
        **_warning(transcript),
    }
    if "segment" in granularities:
        # Clients written for Whisper drop segments by the last three values. ``no_speech_prob`` is 1 minus the highest
        # word confidence. What these models don't have (a seek position, ids of tokens, a temperature) is left out.
        body["segments"] = []
        for number, segment in enumerate(transcript.segments):
            confidences = [max(word.confidence, 1e-6) for word in segment.words]
            text = segment.text.encode()
            body["segments"].append({
                "id": number, "start": round(segment.start, 3), "end": round(segment.end, 3), "text": segment.text,
                "avg_logprob": round(sum(map(math.log, confidences)) / len(confidences), 4),
                "compression_ratio": round(len(text) / len(zlib.compress(text)), 4),
                "no_speech_prob": round(max(0.0, 1 - max(confidences)), 4),
            })
    if "word" in granularities:
        body["words"] = [{"word": word.text, **word.facts()} for word in transcript.words]
    return body


def _usage(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(transcript.duration, 3)}


def _warning(transcript: Transcript) -> dict[str, str]:
    return {} if transcript.warning is None else {"warning": transcript.warning}


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def delta(text: str) -> bytes:
    return event({"type": "transcript.text.delta", "delta": text})


def done(transcript: Transcript) -> bytes:
    return event({"type": "transcript.text.done", "text": transcript.text, "usage": _usage(transcript),
                  **_warning(transcript)})


_SLOW_READER_SECONDS = 60.0  # a client that takes longer to read a part is dropped


class CutOff(Exception):
    """The rest of a response can't be made, and the client must notice."""


class Streamed(Response):
    """Response that streams parts and always closes the request's ``stack`` at the end.

    If making them raises ``CutOff``, the connection is closed without the response's end, so that the client doesn't
    take what it got for the whole.
    """

    def __init__(self, media_type: str, parts: AsyncGenerator[bytes, None], stack: contextlib.ExitStack):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._parts = parts
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stack:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async with contextlib.aclosing(self._parts) as parts:
                    async for part in parts:
                        message = {"type": "http.response.body", "body": part, "more_body": True}
                        await asyncio.wait_for(send(message), _SLOW_READER_SECONDS)
            except CutOff:
                return
            await send({"type": "http.response.body", "body": b""})
