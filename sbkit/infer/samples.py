"""What a stream takes as samples: checked before anything is changed by them, mono, at the model's rate."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import soxr

from sbkit.errors import SbkitError, first_line, shown

#: Rates in hertz that are resampled.
MIN_RATE, MAX_RATE = 8_000, 192_000
#: Samples go from -1 to 1. Beyond this they are no sound that clipped, but numbers of another scale.
_LOUDEST = 100.0


def whole(value: object) -> int | None:
    """Return a whole number, which may be written as 320.0; None for anything else."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, (float, np.floating)) and value.is_integer():
        return int(value)
    return None


def checked(given: object) -> np.ndarray:
    """Return the next samples [N] of a stream as an array, floats from -1 to 1, or int16; refuse what can't be them."""
    samples = _array(given)
    if samples.ndim != 1:
        raise SbkitError(f"a piece of a stream has the shape {[*samples.shape]}, but must be one channel's [N]",
                         hint="mix the channels: samples.mean(1), if they are [N, channels]" if samples.ndim == 2
                         else "give an array of samples")
    if samples.dtype == np.int16:
        return samples
    if samples.dtype.kind != "f":
        raise SbkitError(f"a piece of a stream has samples of type {samples.dtype}, but they must be floats from -1 to "
                         "1, or int16", hint="for 16-bit PCM: np.frombuffer(data, np.int16)")
    most = max(samples.max(), -samples.min()) if len(samples) else 0.0
    if not np.isfinite(most):
        raise SbkitError("a piece of a stream holds values that are not finite (NaN or infinite)",
                         hint="skip it, or replace them by zeros: the stream is unchanged")
    if most > _LOUDEST:
        raise SbkitError(f"a piece of a stream has samples of up to {most:.4g}, but floats go from -1 to 1",
                         hint="divide 16-bit samples by 32768, or give them as int16")
    return samples


def pieces_of(given: object) -> Iterable[Any]:
    """Return the pieces of a stream: those that come, or the only one, be it right or wrong."""
    alone = not isinstance(given, Iterable) or isinstance(given, (np.ndarray, str, bytes, bytearray))
    return cast("Iterable[Any]", [given] if alone else given)


def _array(given: object) -> np.ndarray:
    if isinstance(given, (str, os.PathLike)):
        raise SbkitError(f"a piece of a stream is {str(given)[:80]!r}, but must be an array of samples",
                         hint="read the file first: samples, rate = soundfile.read(FILE); or transcribe it")
    if isinstance(given, (bytes, bytearray)):
        raise SbkitError("a piece of a stream is bytes, but must be an array of samples",
                         hint="for 16-bit PCM: np.frombuffer(data, np.int16)")
    try:
        samples = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise SbkitError(f"a piece of a stream is not an array of samples: {first_line(error)}") from None
    if samples.dtype.kind == "O":
        raise SbkitError(f"a piece of a stream is {type(given).__name__}, but must be an array of samples",
                         hint="give floats from -1 to 1, or int16")
    return samples


def from_pcm(data: bytes) -> np.ndarray:
    """Return 16-bit little-endian samples [N] as int16."""
    return np.frombuffer(data, "<i2").astype(np.int16, copy=False)


def as_floats(samples: np.ndarray) -> np.ndarray:
    """Return checked samples as float32 from -1 to 1."""
    if samples.dtype == np.int16:
        return samples.astype(np.float32) / np.float32(32768)
    return samples.astype(np.float32, copy=False)


def rate_of(value: object) -> int:
    """Return the rate of a stream; refuse what can't be one."""
    rate = whole(value)
    if rate is None or not MIN_RATE <= rate <= MAX_RATE:
        raise SbkitError(f"a stream's rate is {shown(value)} Hz, but must be a whole number from {MIN_RATE} to "
                         f"{MAX_RATE}")
    return rate


class Resampler:
    """Brings the samples of one stream to the model's rate, as they come.

    rate, own : of the samples, and of the model
    """

    def __init__(self, rate: int, own: int):
        self.rate, self._own = rate_of(rate), own
        self.reset()

    def reset(self) -> None:
        self._stream = soxr.ResampleStream(self.rate, self._own, 1, dtype="float32", quality="MQ") \
            if self.rate != self._own else None

    def __call__(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
        """Take the next samples [N] float32, and return those [M] that are ready.

        last : nothing comes after them
        """
        if self._stream is None:
            return samples
        return self._stream.resample_chunk(np.ascontiguousarray(samples), last=last)
