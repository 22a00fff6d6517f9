"""Recordings as blocks of samples at the model's rate, so that hours of audio need no memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import soundfile
import soxr

from sbkit.data import audio
from sbkit.data.audio import AudioError
from sbkit.data.remote import NOWHERE, Remote

BLOCK_SECONDS = 10.0
_LOST_SECONDS = 1.0  # tolerated difference between a recording's length and its header


@dataclass
class Recording:
    """A recording to transcribe.

    audio : a path, a member of a tar shard, the bytes of a file, a binary file, or samples [S] at the model's rate
    start, duration : the part of it, in seconds; without ``duration``, to the end
    """

    audio: str | os.PathLike[str] | bytes | BinaryIO | np.ndarray
    id: str = ""
    start: float = 0.0
    duration: float | None = None
    reference: str | None = None
    called: str = ""
    """Its name in messages, if not its path."""
    remote: Remote = NOWHERE
    """Which URLs may be opened, if ``audio`` is one."""
    warning: str | None = None
    """What is missing of it, known once its blocks were read."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        if self.called:
            return self.called
        if isinstance(self.audio, np.ndarray):
            return self.id or f"<{len(self.audio)} samples>"
        return audio.describe(self.audio)

    def seconds(self, rate: int) -> float:
        """Read the length from the header."""
        if self.duration is not None:
            return self.duration
        if isinstance(self.audio, np.ndarray):
            return len(self.audio) / rate
        return max(audio.audio_info(self.audio, self.remote)[0] - self.start, 0.0)

    def blocks(self, rate: int) -> Iterator[np.ndarray]:
        """Yield mono float32 blocks at ``rate``; raises ``AudioError`` if it can't be read."""
        if isinstance(self.audio, np.ndarray):
            yield from _samples(self.audio, self.name)
        else:
            yield from _decoded(self, self.audio, rate)


#: What can be transcribed.
Source = str | os.PathLike[str] | bytes | BinaryIO | np.ndarray | Recording


def _samples(signal: np.ndarray, name: str) -> Iterator[np.ndarray]:
    if signal.ndim != 1 or not len(signal) or not np.issubdtype(signal.dtype, np.floating):
        raise AudioError(name, f"samples must be floats [S], not {signal.dtype} {list(signal.shape)}")
    signal = np.ascontiguousarray(signal, dtype=np.float32)
    if not np.isfinite(signal.sum()):
        raise AudioError(name, "holds values that are not finite (NaN or infinite)")
    yield signal


def _decoded(recording: Recording, source: str | os.PathLike[str] | bytes | BinaryIO,
             rate: int) -> Iterator[np.ndarray]:
    name, start, duration = recording.name, recording.start, recording.duration
    with audio.open_recording(source, name, recording.remote) as (file, exact, frames):
        own = file.samplerate
        first = round(start * own)
        if first >= file.frames:
            raise AudioError(name, f"is {file.frames / own:.2f} s long, so there is nothing from {start:.2f} s on")
        wanted = file.frames - first if duration is None else min(round(duration * own), file.frames - first)
        promised, there = frames()
        if duration is not None:
            promised = first + round(duration * own)
            there = min(there, file.frames, promised)
        recording.warning = audio.length_mismatch(promised - first, there - first, own)
        at = min(first, exact)
        if at:
            file.seek(at)
        file.seekable = lambda: False  # otherwise soundfile seeks after each read, which is slow, and inexact for MP3
        size = round(BLOCK_SECONDS * own)
        if first > at:  # where seeking isn't exact, decode what comes before too
            at += sum(map(len, _reads(file, name, first - at, size)))
            if at < first:
                raise AudioError(name, f"cut off: it ends after {at / own:.2f} of {file.frames / own:.2f} s, before "
                                       f"the part from {start:.2f} s on")
        resampler = soxr.ResampleStream(own, rate, 1, dtype="float32", quality="MQ") if own != rate else None
        read = 0
        for block in _reads(file, name, wanted, size):
            read += len(block)
            signal = audio.to_mono(block) if block.shape[1] > 1 else block[:, 0]
            if not np.isfinite(signal.sum()):
                raise AudioError(name, "holds values that are not finite (NaN or infinite)")
            if resampler is not None:
                signal = resampler.resample_chunk(signal, last=read >= wanted)
            if len(signal):
                yield np.ascontiguousarray(signal)
        if resampler is not None and read < wanted and len(rest := resampler.resample_chunk(
                np.zeros(0, dtype=np.float32), last=True)):
            yield rest
        if read < min(wanted, 1) or (wanted - read) / own > max(_LOST_SECONDS, 0.1 * wanted / own):
            raise AudioError(name, f"cut off: {read / own:.2f} of {wanted / own:.2f} s can be read")
        if not read:
            raise AudioError(name, "holds no audio")


def _reads(file: soundfile.SoundFile, name: str, frames: int, size: int) -> Iterator[np.ndarray]:
    """Read the next ``frames`` in blocks [S, C] of ``size``; fewer if the recording ends early."""
    read = 0
    while read < frames:
        try:
            block = file.read(min(size, frames - read), dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise AudioError(name, f"damaged or cut off after {read / file.samplerate:.2f} of "
                                   f"{frames / file.samplerate:.2f} s: {error.error_string}") from None
        if not len(block):
            return
        yield block
        read += len(block)
