"""Collects the audio of a live session: raw frames of a client in, samples at the model's rate out."""

from __future__ import annotations

import numpy as np

from sbkit.infer.samples import Resampler, as_floats, from_pcm
from sbkit.infer.sound_sources import FileSniffer
from sbkit.serve.errors import invalid

#: The longest frame.
_MAX_FRAME_SECONDS = 10.0
_BYTES_PER_SAMPLE = 2


class AudioBuffer:
    """Keeps frames as received until the samples are taken, so that a packet of 20 ms costs little.

    rate : samples per second of the client
    model_rate : samples per second of the model
    """

    def __init__(self, rate: int, model_rate: int):
        self._rate = rate
        self._model_rate = model_rate
        self._max_bytes = int(_BYTES_PER_SAMPLE * rate * _MAX_FRAME_SECONDS)
        self._resampler = Resampler(rate, model_rate)
        self._sniffer = FileSniffer()
        self._frames: list[bytes] = []
        self._received = 0  # bytes of all frames, and of those that were taken
        self._taken = 0

    @property
    def seconds(self) -> float:
        """Seconds of all frames."""
        return self._received / _BYTES_PER_SAMPLE / self._rate

    @property
    def samples(self) -> float:
        """About how many samples at the model's rate :meth:`take` would return."""
        return (self._received - self._taken) / _BYTES_PER_SAMPLE * self._model_rate / self._rate

    def add(self, frame: bytes) -> None:
        """Add a frame of the client; raises ``ApiError`` for one that can't be audio."""
        if not frame:
            raise invalid("empty_frame", "a frame of audio is empty: send none while there is no audio")
        kind = self._sniffer.kind(frame)
        if kind is not None:
            raise invalid("invalid_audio", f"the audio is a file ({kind}), but must be raw 16-bit samples: send a file "
                          "to /v1/audio/transcriptions")
        if len(frame) % _BYTES_PER_SAMPLE:
            raise invalid("invalid_frame", "a frame of audio must be 16-bit samples, so an even number of bytes")
        if len(frame) > self._max_bytes:
            raise invalid("invalid_frame", f"a frame of audio must be shorter than {_MAX_FRAME_SECONDS:g} s")
        self._frames.append(frame)
        self._received += len(frame)

    def take(self, last: bool = False) -> np.ndarray:
        """Return the samples [S] since the last call, float32; ``last``: nothing comes after them."""
        pcm = b"".join(self._frames)
        self._frames = []
        self._taken = self._received
        return self._resampler(as_floats(from_pcm(pcm)), last)
