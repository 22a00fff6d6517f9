"""The audio of a live session: frames of 16-bit samples in, samples at the model's rate out."""

from __future__ import annotations

import numpy as np

from sbkit.infer.file_beginnings import Beginning
from sbkit.infer.samples import MAX_RATE, MIN_RATE, Resampler, as_floats, whole
from sbkit.serve.errors import invalid

_LONGEST_FRAME_SECONDS = 10.0


class Intake:
    """Keeps what came as it came until it is wanted: a packet of 20 ms costs next to nothing by itself.

    Arguments
    ---------
    rate, own : of the client, and of the model
    """

    def __init__(self, rate: int, own: int):
        self._rate, self._own = rate, own
        self._longest = int(2 * rate * _LONGEST_FRAME_SECONDS)
        self._resampler, self._beginning = Resampler(rate, own), Beginning()
        self._frames: list[bytes] = []
        self._came = self._taken = 0  # bytes

    @property
    def seconds(self) -> float:
        """The seconds received so far."""
        return self._came / 2 / self._rate

    @property
    def held(self) -> float:
        """About how many samples at the model's rate :meth:`take` would give."""
        return (self._came - self._taken) / 2 * self._own / self._rate

    def add(self, frame: bytes) -> None:
        """Add a frame of the client; raises ``ApiError`` for one that can't be audio."""
        if not frame:
            raise invalid("a frame of audio is empty: send none while there is nothing to hear", code="empty_frame")
        if (kind := self._beginning.file(frame)) is not None:
            raise invalid(f"the audio begins like a file ({kind}), but must be 16-bit samples alone: send a file to "
                          "/v1/audio/transcriptions", code="invalid_audio")
        if len(frame) % 2:
            raise invalid("a frame of audio must be 16-bit samples, so an even number of bytes")
        if len(frame) > self._longest:
            raise invalid(f"a frame of audio must be shorter than {_LONGEST_FRAME_SECONDS:g} s")
        self._frames.append(frame)
        self._came += len(frame)

    def take(self, last: bool = False) -> np.ndarray:
        """Return the samples [S] since the last call, float32; ``last``: nothing comes after them."""
        frames, self._frames, self._taken = self._frames, [], self._came
        return self._resampler(as_floats(np.frombuffer(b"".join(frames), "<i2").astype(np.int16, copy=False)), last)


def rate_of(value: object) -> int:
    """Check the rate that a client names."""
    rate = whole(value)
    if rate is None or not MIN_RATE <= rate <= MAX_RATE:
        raise invalid(f"sample_rate must be a whole number from {MIN_RATE} to {MAX_RATE}", "sample_rate")
    return rate
