"""Samples of a stream: checked, converted to floats, and resampled to the model's rate."""

from __future__ import annotations

import numbers
import os

import numpy as np
import soxr

from sbkit.errors import SbkitError, first_line, shown

#: Rates in hertz that can be resampled.
MIN_RATE, MAX_RATE = 8_000, 192_000
#: Samples go from -1 to 1. Values above this are not clipping, but another scale.
LOUDEST = 100.0


def as_int(value: object) -> int | None:
    """Return a whole number, such as 320 or 320.0, as an int; None for anything else."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, (float, np.floating)) and value.is_integer():
        return int(value)
    return None


def check_samples(piece: object) -> np.ndarray:
    """Return samples [N] as an array of floats from -1 to 1, or int16; raises if they can't be samples."""
    if isinstance(piece, (str, os.PathLike)):
        raise SbkitError("not-samples", f"a piece of a stream is {str(piece)[:80]!r}, but must be an array of samples",
                         hint="read the file first: samples, rate = soundfile.read(FILE); or transcribe it")
    if isinstance(piece, (bytes, bytearray)):
        raise SbkitError("not-samples", "a piece of a stream is bytes, but must be an array of samples",
                         hint="for 16-bit PCM: np.frombuffer(data, np.int16)")
    try:
        samples = np.asarray(piece)
    except (TypeError, ValueError) as error:
        raise SbkitError("not-samples", "a piece of a stream is not an array of samples: "
                         f"{first_line(error)}") from None
    if samples.dtype.kind == "O":
        raise SbkitError("not-samples", f"a piece of a stream is {type(piece).__name__}, but must be an array of "
                         "samples", hint="give floats from -1 to 1, or int16")
    if samples.ndim != 1:
        hint = "give an array of samples"
        if samples.ndim == 2:
            hint = "mix the channels: samples.mean(1), if they are [N, channels]"
        raise SbkitError("not-samples", f"a piece of a stream has the shape {[*samples.shape]}, but must be one "
                         "channel's [N]", hint=hint)
    if samples.dtype == np.int16:
        return samples
    if samples.dtype.kind != "f":
        raise SbkitError("not-samples", f"a piece of a stream has samples of type {samples.dtype}, but they must be "
                         "floats from -1 to 1, or int16", hint="for 16-bit PCM: np.frombuffer(data, np.int16)")
    peak = max(samples.max(), -samples.min()) if len(samples) else 0.0
    if not np.isfinite(peak):
        raise SbkitError("bad-samples", "a piece of a stream has samples that are NaN or infinite",
                         hint="skip it, or replace these samples by zeros: the stream is unchanged")
    if peak > LOUDEST:
        raise SbkitError("not-samples", f"a piece of a stream has samples of up to {peak:.4g}, but floats go from -1 "
                         "to 1", hint="divide 16-bit samples by 32768, or give them as int16")
    return samples


def from_pcm(data: bytes) -> np.ndarray:
    """Return 16-bit little-endian samples [N] as int16."""
    return np.frombuffer(data, "<i2").astype(np.int16, copy=False)


def as_floats(samples: np.ndarray) -> np.ndarray:
    """Return checked samples as float32 from -1 to 1."""
    if samples.dtype == np.int16:
        return samples.astype(np.float32) / np.float32(32768)
    return samples.astype(np.float32, copy=False)


def check_rate(value: object) -> int:
    """Return a stream's rate as an int; raises if it is invalid."""
    if value is None:
        raise SbkitError("bad-value", "the sample rate is missing", hint="pass sample_rate, such as 16000",
                         key="sample_rate")
    rate = as_int(value)
    if rate is None or not MIN_RATE <= rate <= MAX_RATE:
        raise SbkitError("bad-value", f"the sample rate is {shown(value)} Hz, but must be a whole number from "
                         f"{MIN_RATE} to {MAX_RATE}", key="sample_rate", value=value)
    return rate


class Resampler:
    """Resamples one stream to the model's rate, as samples come.

    rate : the samples'
    model_rate : the model's
    """

    def __init__(self, rate: int, model_rate: int):
        self.rate = check_rate(rate)
        self._model_rate = model_rate
        self.reset()

    def reset(self) -> None:
        self._stream: soxr.ResampleStream | None = None
        if self.rate != self._model_rate:
            self._stream = soxr.ResampleStream(self.rate, self._model_rate, 1, dtype="float32", quality="MQ")

    def __call__(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
        """Take the next samples [N] float32; returns the resampled ones [M] that are ready.

        last : they are the last ones
        """
        if self._stream is None:
            return samples
        return self._stream.resample_chunk(np.ascontiguousarray(samples), last=last)
