"""Recordings as blocks of samples at the model's rate, so that hours of audio need little memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import soxr

from sbkit.data import audio
from sbkit.data.audio import AudioError, LengthMismatch
from sbkit.data.remote import NO_REMOTE, Remote
from sbkit.errors import printable
from sbkit.infer.samples import LOUDEST

logger = logging.getLogger(__name__)

BLOCK_SECONDS = 10.0


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
    remote: Remote = NO_REMOTE
    """Which URLs may be opened, if ``audio`` is one."""
    rate: int | None = None
    """The samples a second of an array; None: as many as the model's."""
    mismatch: LengthMismatch | None = None
    """How its file differs from what its header says; known after its blocks were read."""

    @classmethod
    def of(cls, source: Source, id: str = "", rate: int | None = None) -> Recording:
        """Return a recording of some audio, of which samples have a ``rate``; a recording is returned unchanged."""
        if isinstance(source, Recording):
            return source
        if isinstance(source, (str, os.PathLike, bytes, bytearray)) or hasattr(source, "read"):
            return cls(source, id)
        array: Any = source  # perhaps a tensor of torch, which inference doesn't import
        if hasattr(array, "detach"):
            array = array.detach().cpu()
            if array.is_floating_point():
                array = array.float()  # numpy has no bfloat16
        if not hasattr(array, "__array__"):
            raise TypeError(f"a recording is a path, the bytes of a file, a binary file or an array of samples, not "
                            f"{type(source).__name__}")
        samples = np.asarray(array)
        if samples.ndim == 2 and 1 in samples.shape:  # one channel
            samples = samples.reshape(-1)
        if samples.dtype == np.int16:
            samples = samples / np.float32(32768)
        return cls(samples, id, rate=rate)

    @property
    def warning(self) -> str | None:
        """What is missing of it; known after its blocks were read."""
        return None if self.mismatch is None else self.mismatch.description

    @property
    def name(self) -> str:
        """Its name in messages, which a stranger may have given it."""
        if self.called:
            return self.called
        if isinstance(self.audio, np.ndarray):
            return printable(self.id) or f"<{self.audio.size} samples>"
        return printable(audio.describe(self.audio))

    def seconds(self, rate: int) -> float:
        """Read the length from the header."""
        if self.duration is not None:
            return self.duration
        if isinstance(self.audio, np.ndarray):
            return len(self.audio) / (self.rate or rate)
        return max(audio.audio_info(self.audio, self.remote)[0] - self.start, 0.0)

    def samples(self, rate: int) -> np.ndarray:
        """Read all of it: float32 [S] at ``rate``; raises ``AudioError`` if it can't be read."""
        signal = np.concatenate(list(self.blocks(rate)))
        self.log_warning()
        return signal

    def log_warning(self) -> None:
        """Log what is missing of it, once it was read."""
        if self.warning is not None:
            logger.warning("%s: %s", self.name, self.warning)

    def blocks(self, rate: int) -> Iterator[np.ndarray]:
        """Yield mono float32 blocks at ``rate``; raises ``AudioError`` if it can't be read."""
        if isinstance(self.audio, np.ndarray):
            signal = self.audio
            if signal.ndim != 1 or not len(signal) or not np.issubdtype(signal.dtype, np.floating):
                raise AudioError("not-samples", self.name, "samples must be floats of one channel, -1 to 1, or int16, "
                                 f"not {signal.dtype} {list(signal.shape)}")
            signal = np.ascontiguousarray(signal, dtype=np.float32)
            audio.check_values(self.name, signal)
            peak = np.abs(signal).max()
            if peak > LOUDEST:
                raise AudioError("not-samples", self.name, f"has samples of up to {peak:.4g}, but floats go from -1 to "
                                 "1: divide 16-bit samples by 32768, or give them as int16")
            yield signal if self.rate in (None, rate) else soxr.resample(signal, self.rate, rate, quality="MQ")
            return
        with audio.open_recording(self.audio, self.name, self.remote) as opened:
            file_rate = opened.file.samplerate
            expected, available = opened.frames()
            first = round(self.start * file_rate)
            if self.duration is not None:
                expected = first + round(self.duration * file_rate)
                available = min(available, opened.file.frames, expected)
            self.mismatch = audio.length_mismatch(expected - first, available - first, opened.file)
            resampler = None
            if file_rate != rate:
                resampler = soxr.ResampleStream(file_rate, rate, 1, dtype="float32", quality="MQ")
            read = 0  # samples of the file
            for signal in opened.blocks(self.start, self.duration, whole=False, block_seconds=BLOCK_SECONDS):
                read += len(signal)
                audio.check_values(self.name, signal)
                if resampler is not None:
                    signal = resampler.resample_chunk(signal)
                if len(signal):
                    yield np.ascontiguousarray(signal)
            if resampler is not None:
                rest = resampler.resample_chunk(np.zeros(0, np.float32), last=True)
                if len(rest):
                    yield rest
            if read < min(expected, available) - first:  # an MP3 has less than its header says, or its end is damaged
                self.mismatch = audio.length_mismatch(expected - first, read, opened.file)


#: What can be transcribed.
Source = str | os.PathLike[str] | bytes | BinaryIO | np.ndarray | Recording
