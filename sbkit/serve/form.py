"""The request form of OpenAI's API: received within limits of time and size, each field checked, unknown ones refused.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, MutableMapping
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from sbkit.data.language_code import may_be_same
from sbkit.serve.disk import disk_errors_as_api_error
from sbkit.serve.errors import invalid, too_slow, unsupported
from sbkit.serve.limits import Limits
from sbkit.serve.registry import Registry, S
from sbkit.serve.served_kinds import ServedGraph, ServedRecogniser
from sbkit.serve.text import decode_utf8

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
GRANULARITIES = ("word", "segment")
#: A stream sends pieces of the text, so subtitle formats are not possible.
_STREAMABLE = ("json", "text")
_FIELDS = frozenset({"file", "model", "language", "prompt", "response_format", "temperature", "stream",
                    "timestamp_granularities", "chunking_strategy"})
_OUTPUTS_FIELDS = frozenset({"file", "model", "response_format"})
_CORRECTION_FIELDS = frozenset({"file", "model", "text", "heard"})
_MAX_FIELDS, _FIELD_BYTES = 32, 1 << 16
_TYPE_BYTES = 256  # of the content type
_HEADER_BYTES = 1 << 12  # of the headers of all parts together
_PIECE_BYTES = 1 << 13  # bytes that are parsed before other requests have their turn
F = TypeVar("F")
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{1,70}")  # by RFC 2046


@dataclass
class Form:
    """A valid request. ``prompt`` and ``temperature`` have no effect: these models don't use them."""

    upload: IO[bytes]
    """The upload, closed by the caller."""
    served: ServedRecogniser
    response_format: str
    granularities: tuple[str, ...]
    stream: bool


@dataclass
class OutputsForm:
    """A valid request for a model's tensors."""

    upload: IO[bytes]
    """The upload, closed by the caller."""
    served: ServedGraph
    sound: bool
    """Whether the first output is requested as a WAV file."""


@dataclass
class CorrectionForm:
    """A valid request to keep the words of a recording."""

    upload: IO[bytes]
    """The upload, closed by the caller."""
    served: ServedRecogniser
    text: str
    heard: str | None
    """What the model recognised."""


async def read(request: Request, kind: Callable[[FormData, Registry], F], registry: Callable[[], Registry]) -> F:
    """Read a form, and check it as one of a kind: ``transcription``, ``outputs`` or ``correction``."""
    content_type = request.headers.get("content-type", "")
    if len(content_type) > _TYPE_BYTES:
        raise invalid("invalid_body", f"the content type is longer than {_TYPE_BYTES} characters")
    media, options = parse_options_header(content_type)
    if media != b"multipart/form-data":
        raise invalid("invalid_body", "the body must be multipart/form-data with the fields file and model")
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
        raise invalid("not_utf8", "the form must be UTF-8: leave out the charset")
    boundary = options.get(b"boundary", b"")
    if not _BOUNDARY.fullmatch(boundary):
        raise invalid("invalid_body", "the form can't be read: its boundary is missing or invalid")
    # Starlette's parser would use any codec that a client names, and some take minutes. Latin-1 keeps every byte.
    headers = Headers({"content-type": f'multipart/form-data; charset=latin-1; boundary="{boundary.decode()}"'})
    try:
        with disk_errors_as_api_error():
            form = await _FormParser(headers, _pieces(request), max_files=1, max_fields=_MAX_FIELDS,
                                     max_part_size=_FIELD_BYTES).parse()
    except MultiPartException as error:
        raise invalid("invalid_body", f"the form can't be read: {error.message}") from None
    except (ValueError, KeyError, TypeError) as error:  # invalid headers
        raise invalid("invalid_body", f"the form can't be read: {error}") from None
    try:
        fields = [(_utf8(name), _utf8(value) if isinstance(value, str) else value)
                  for name, value in form.multi_items()]
        return kind(FormData(fields), registry())
    except BaseException:
        await form.close()
        raise


def _utf8(text: str) -> str:
    return decode_utf8(text.encode("latin-1"), "each field of the form")


async def _pieces(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces, and let other tasks run after each."""
    async for data in request.stream():
        for start in range(0, len(data), _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES]
            await asyncio.sleep(0)


class _FormParser(MultiPartParser):
    """Starlette's parser, with a limit for the headers of all parts together, which it parses byte by byte."""

    _headers_left = _HEADER_BYTES

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._headers_left -= end - start
        if self._headers_left < 0:
            raise MultiPartException(f"The headers of the parts have more than {_HEADER_BYTES} bytes.")
        super().on_header_value(data, start, end)


def outputs(form: FormData, registry: Registry) -> OutputsForm:
    """Check a form as a request for a model's tensors."""
    served = _model(registry, ServedGraph, form, _OUTPUTS_FIELDS)
    kind = _text(form, "response_format") or "json"
    if kind not in ("json", "wav"):
        raise invalid("unsupported_value", f"response_format {kind[:40]!r} must be json or wav", "response_format")
    return OutputsForm(_file(form), served, kind == "wav")


def correction(form: FormData, registry: Registry) -> CorrectionForm:
    """Check a form as a request to keep the words of a recording."""
    served = _model(registry, ServedRecogniser, form, _CORRECTION_FIELDS)
    return CorrectionForm(_file(form), served, _text(form, "text") or "", _text(form, "heard"))


def _model(registry: Registry, kind: type[S], form: FormData, known: frozenset[str]) -> S:
    """The model that a form names, which must work; the form may have only ``known`` fields."""
    unknown = sorted({name.removesuffix("[]") for name in form} - known)
    if unknown:
        if "file" not in form and isinstance(form.get(unknown[0]), UploadFile):
            raise invalid("unsupported_parameter", f"the recording belongs in the field file, not {unknown[0][:40]}",
                          unknown[0][:40])
        raise unsupported(unknown, known)
    return registry.working(_text(form, "model"), kind)


def transcription(form: FormData, registry: Registry) -> Form:
    """Check a form as a request for a transcript."""
    served = _model(registry, ServedRecogniser, form, _FIELDS)
    language = _text(form, "language")
    if language and not may_be_same(language, served.config.language):
        raise invalid("unsupported_value", f"the model {served.name} is for {served.config.language!r}, not "
                      f"{language[:40]!r}", "language")
    temperature = _text(form, "temperature")
    try:
        valid = 0 <= float(temperature or 0) <= 1
    except ValueError:
        valid = False
    if temperature and not valid:
        raise invalid("invalid_value", f"temperature {temperature[:40]!r} must be a number from 0 to 1", "temperature")
    if _text(form, "chunking_strategy") not in (None, "", "auto"):
        raise invalid("unsupported_value", "chunking_strategy can only be 'auto' here", "chunking_strategy")
    kind = _text(form, "response_format") or "json"
    if kind not in FORMATS:
        raise invalid("unsupported_value", f"response_format {kind[:40]!r} must be one of {', '.join(FORMATS)}",
                      "response_format")
    granularities: list[str] = []
    for value in [*form.getlist("timestamp_granularities[]"), *form.getlist("timestamp_granularities")]:
        if not isinstance(value, str) or value not in GRANULARITIES:
            shown = repr(value[:40]) if isinstance(value, str) else "a file"
            raise invalid("unsupported_value", f"timestamp_granularities: {shown} must be one of "
                          f"{', '.join(GRANULARITIES)}", "timestamp_granularities")
        granularities.append(value)
    if granularities and kind != "verbose_json":
        raise invalid("invalid_value", "timestamp_granularities needs response_format verbose_json",
                      "timestamp_granularities")
    stream_text = _text(form, "stream") or "false"
    if stream_text.lower() not in ("false", "0", "true", "1"):
        raise invalid("invalid_value", f"stream is {stream_text[:40]!r}, but must be true or false", "stream")
    stream = stream_text.lower() in ("true", "1")
    if stream and kind not in _STREAMABLE:
        raise invalid("unsupported_value", f"{kind} can't be streamed; use json", "response_format")
    return Form(_file(form), served, kind, tuple(granularities) or ("segment",), stream)


def _text(form: FormData, name: str) -> str | None:
    """Return a field's text; None if the form lacks it."""
    values = form.getlist(name)
    if len(values) > 1:
        raise invalid("duplicate_parameter", f"{name} is given twice", name)
    if not values:
        return None
    if not isinstance(values[0], str):
        raise invalid("invalid_type", f"{name} must be text, not a file", name)
    return values[0]


def _file(form: FormData) -> IO[bytes]:
    values = form.getlist("file")
    if not values:
        raise invalid("missing_required_parameter", "the field file with the audio is missing", "file")
    if len(values) > 1 or not isinstance(values[0], UploadFile):
        raise invalid("invalid_type", "the field file must be one file, sent with a file name", "file")
    if not values[0].size:
        raise invalid("invalid_audio", "the file is empty", "file")
    return values[0].file


def limited(request: Request, limits: Limits, reserve: Callable[[int], None]) -> Request:
    """Return a request whose body must be uncompressed, arrive fast enough, and fit.

    reserve : called with the bytes that the request claims, then with those that have arrived; raises ``ApiError`` if
        they are too many
    """
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise invalid("invalid_body", "compressed bodies are not supported; send the body uncompressed")
    claimed = request.headers.get("content-length", "0")
    if not claimed.isdecimal():
        raise invalid("invalid_body", "content-length is not a number")
    reserve(int(claimed[:20]))
    min_speed = limits.min_upload_kbs * 1024
    received = 0  # bytes
    waited = 0.0  # seconds
    complete = False

    async def receive() -> MutableMapping[str, Any]:
        """Receive the next message. The clock runs only while waiting for the client."""
        nonlocal received, waited, complete
        if complete:
            return await request.receive()
        started = time.monotonic()
        seconds_left = limits.upload_grace_seconds + received / min_speed - waited
        try:
            message = await asyncio.wait_for(request.receive(), max(seconds_left, 0.01))
        except (asyncio.TimeoutError, TimeoutError):
            complete = True
            raise too_slow(f"arrives at less than {limits.min_upload_kbs:g} KB a second") from None
        waited += time.monotonic() - started
        received += len(message.get("body", b""))
        complete = not message.get("more_body")
        reserve(received)
        return message

    return Request(request.scope, receive)
