"""Messages of a live client: JSON objects, or audio, which becomes samples at the model's rate."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from sbkit.infer.samples import Resampler, as_floats, from_pcm
from sbkit.infer.sound_sources import FileSniffer
from sbkit.serve.errors import ApiError, invalid
from sbkit.serve.text import parse_object

_MAX_TEXT = 1 << 14


class MessageReader:
    """Receives the messages of one client.

    Its idle clock runs only during :meth:`receive`: while a message is being processed, others may be waiting already.
    """

    def __init__(self, websocket: WebSocket):
        self._websocket = websocket
        self._waits_since: float | None = None

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

    async def receive_within(self, seconds: float) -> bytes | dict[str, Any]:
        try:
            return await asyncio.wait_for(self.receive(), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise _idle(seconds) from None

    async def watch(self, seconds: float) -> None:
        """Raise ``ApiError`` 408 if no message comes for ``seconds``; cheaper than a timeout per message."""
        while (left := seconds - self._waited) > 0:
            await asyncio.sleep(left)
        raise _idle(seconds)

    @property
    def _waited(self) -> float:
        return 0.0 if self._waits_since is None else time.monotonic() - self._waits_since


def _idle(seconds: float) -> ApiError:
    return ApiError(408, f"nothing was received for {seconds:g} s", code="idle")


_MAX_FRAME_SECONDS = 10.0


class AudioBuffer:
    """Keeps frames as received until the samples are taken, so that a packet of 20 ms costs little.

    rate, model_rate : of the client, and of the model
    """

    def __init__(self, rate: int, model_rate: int):
        self._rate, self._model_rate = rate, model_rate
        self._max_bytes = int(2 * rate * _MAX_FRAME_SECONDS)
        self._resampler, self._sniffer = Resampler(rate, model_rate), FileSniffer()
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
        if (kind := self._sniffer.kind(frame)) is not None:
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
        frames, self._frames, self._taken = self._frames, [], self._received
        return self._resampler(as_floats(from_pcm(b"".join(frames))), last)
