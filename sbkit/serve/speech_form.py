"""The request of OpenAI's API for speech: every field is checked, the text to its last character."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from sbkit.infer.sentences import Phrase, Script
from sbkit.infer.sound_file import KINDS, kinds
from sbkit.infer.symbols import UnknownCharacters, UnspeakableText
from sbkit.infer.voice import FASTEST, SLOWEST
from sbkit.serve.errors import invalid, shown, too_large
from sbkit.serve.registry import Registry, ServedVoice
from sbkit.serve.text import decoded, json_object

MAX_CHARACTERS = 4096
_MAX_BYTES = 1 << 16  # so many characters as JSON, each of them two escapes
_TAKEN = ("input", "model", "voice", "response_format", "speed", "stream_format", "instructions", "skip_unknown")
_DEFAULT, _AUDIO, _SSE = "mp3", "audio", "sse"


@dataclass(frozen=True)
class SpeechForm:
    """A valid request.

    pieces : the whole text, as the voice takes it
    kind : the format, one of ``sbkit.infer.sound_file.KINDS``
    sse : whether events are sent, otherwise bytes
    """

    served: ServedVoice
    pieces: list[Phrase]
    speaker: int
    kind: str
    speed: float
    sse: bool

    @property
    def media_type(self) -> str:
        """The type of the bytes."""
        return KINDS[self.kind].media_type


def limit_size(size: int) -> None:
    """Raise ``ApiError`` 413 if a request has more bytes than are kept in memory."""
    if size > _MAX_BYTES:
        raise too_large(_MAX_BYTES, param=None)


async def read(request: Request, registry: Callable[[], Registry], step: Callable[..., Awaitable[Any]]) -> SpeechForm:
    """Read and check a request, its text by ``step`` in a thread."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise invalid("the body must be application/json with the fields model, input and voice")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise invalid("compressed bodies are not supported; send it uncompressed")
    fields = json_object(decoded(await request.body(), "the body"), "the body")
    found: SpeechForm = await step(_read, fields, registry())
    return found


def _read(fields: dict[str, Any], registry: Registry) -> SpeechForm:
    if unknown := sorted(set(fields) - set(_TAKEN)):
        raise invalid(f"this server does not support {', '.join(map(shown, unknown[:8]))}",
                      code="unsupported_parameter")
    served = registry.find(_text(fields, "model", needed=True), ServedVoice)
    served.check()
    text = _text(fields, "input", needed=True)
    if len(text) > MAX_CHARACTERS:
        raise invalid(f"input has {len(text)} characters; a request may have {MAX_CHARACTERS}: send the text in parts",
                      "input", "string_above_max_length")
    speaker = _speaker(fields.get("voice"), served)
    kind = _kind(fields)
    speed = _speed(fields.get("speed"))
    streamed = _text(fields, "stream_format") or _AUDIO
    if streamed not in (_AUDIO, _SSE):
        raise invalid(f"stream_format {shown(streamed)} must be {_AUDIO} or {_SSE}", "stream_format",
                      "unsupported_value")
    if _text(fields, "instructions"):
        raise invalid(f"the model {served.name} speaks in one way only and can't follow instructions; leave them out",
                      "instructions", "unsupported_parameter")
    return SpeechForm(served, _pieces(text, fields, served), speaker, kind, speed, streamed == _SSE)


def _text(fields: dict[str, Any], name: str, needed: bool = False) -> str:
    value = fields.get(name)
    if value is None:
        if needed:
            raise invalid(f"the field {name} is missing", name)
        return ""
    if not isinstance(value, str):
        raise invalid(f"{name} must be a text, not {shown(value)}", name)
    return value


def _speaker(value: object, served: ServedVoice) -> int:
    if isinstance(value, dict) and set(value) == {"id"}:
        value = value["id"]
    speakers = served.config.speakers
    if value is None:
        return 0
    if not isinstance(value, str):
        raise invalid('voice must be a name, or {"id": NAME}', "voice")
    if value not in speakers:
        raise invalid(f"the model {served.name} has no voice {shown(value)}; it has {', '.join(speakers)}", "voice",
                      "voice_not_found")
    return speakers.index(value)


def _kind(fields: dict[str, Any]) -> str:
    kind = _text(fields, "response_format") or _DEFAULT
    if kind not in kinds():
        raise invalid(f"response_format {shown(kind)} can't be written here; use one of {', '.join(kinds())}",
                      "response_format", "unsupported_value")
    return kind


def _speed(value: object) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not SLOWEST <= value <= FASTEST:
        raise invalid(f"speed {shown(value)} must be a number from {SLOWEST:g} to {FASTEST:g}", "speed")
    return float(value)


def _pieces(text: str, fields: dict[str, Any], served: ServedVoice) -> list[Phrase]:
    skip = fields.get("skip_unknown")
    if not isinstance(skip, (bool, type(None))):
        raise invalid(f"skip_unknown must be true or false, not {shown(skip)}", "skip_unknown")
    try:
        return list(Script(served.config, bool(skip)).read(text))
    except UnspeakableText as error:
        code = "unknown_characters" if isinstance(error, UnknownCharacters) else "empty_input"
        raise invalid(str(error), "input", code) from None
