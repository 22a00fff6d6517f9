"""Writes samples as WAV, FLAC, MP3, Opus or raw PCM, to a file or a stream of bytes, with libsndfile."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import soundfile
import soxr

from sbkit.errors import SbkitError


@dataclass(frozen=True)
class SoundFormat:
    """A format of sound files.

    format, subtype : libsndfile's names for it
    media_type : its type in HTTP
    rates : supported sample rates; none: any
    streams : whether it can be read without a length in its header
    options : for libsndfile
    """

    format: str
    subtype: str
    media_type: str
    rates: tuple[int, ...] = ()
    streams: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def available(self) -> bool:
        return self.subtype in soundfile.available_subtypes(self.format)

    def rate(self, rate: int) -> int:
        """Return the rate to write sound of this rate with: the next that the format supports."""
        if not self.rates:
            return rate
        return next((supported for supported in self.rates if supported >= rate), self.rates[-1])


_OPUS_RATES = (8_000, 12_000, 16_000, 24_000, 48_000)
_MP3_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
#: A constant bit rate, by which players estimate the length of a stream without one in its header.
_MP3_OPTIONS = {"bitrate_mode": "CONSTANT", "compression_level": 0.5}  # 80 kbit/s, from 32 kHz on 176
KINDS = {
    "mp3": SoundFormat("MP3", "MPEG_LAYER_III", "audio/mpeg", _MP3_RATES, options=_MP3_OPTIONS),
    "opus": SoundFormat("OGG", "OPUS", "audio/ogg", _OPUS_RATES),
    "flac": SoundFormat("FLAC", "PCM_16", "audio/flac", streams=False),
    "wav": SoundFormat("WAV", "PCM_16", "audio/wav"),
    "pcm": SoundFormat("RAW", "PCM_16", "audio/pcm", (24_000,)),
}
#: The format of each file suffix.
SUFFIXES = {".wav": "wav", ".wave": "wav", ".flac": "flac", ".mp3": "mp3", ".ogg": "opus", ".oga": "opus",
            ".opus": "opus"}
_BLOCK = 1 << 16  # samples
_WAV_SIZES = (4, 40)  # where the sizes are in a WAV file's header
_UNKNOWN_SIZE = 0xFFFFFFFF


def kinds() -> list[str]:
    """The names of the formats that this machine can write."""
    return [name for name, kind in KINDS.items() if kind.available]


def kind_of(path: Path) -> str:
    """Return the format of a file's suffix, or raise."""
    name = SUFFIXES.get(path.suffix.lower())
    if name is None or not KINDS[name].available:
        usable = [suffix for suffix, kind in SUFFIXES.items() if KINDS[kind].available]
        what = f"{path.suffix} files can't be written" if path.suffix else f"{path} has no suffix for an audio format"
        raise SbkitError("bad-option", what, hint=f"use {', '.join(usable)}", file=path)
    return name


class SoundWriter:
    """Writes samples into a binary file.

    kind : one of ``KINDS``
    rate : samples per second of the input; resampled if the format doesn't support it
    """

    def __init__(self, file: IO[bytes] | _Sink, kind: str, rate: int):
        format = KINDS[kind]
        file_rate = format.rate(rate)
        self._resampler = soxr.ResampleStream(rate, file_rate, 1, dtype="float32") if file_rate != rate else None
        endian = "LITTLE" if format.format in ("RAW", "WAV") else None
        self._out = _DeferredErrors(file)
        self._file = soundfile.SoundFile(self._out, "w", file_rate, 1, format.subtype, endian, format.format,
                                         **format.options)

    def add(self, samples: np.ndarray, last: bool = False) -> None:
        """Write float samples [S] from -1 to 1."""
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=last)
        for begin in range(0, len(samples), _BLOCK):  # in blocks: libsndfile keeps a whole block on its stack
            with self._out:
                self._file.write(samples[begin : begin + _BLOCK].clip(-1.0, 1.0))

    def end(self) -> None:
        if self._resampler is not None:
            self.add(np.zeros(0, dtype=np.float32), last=True)
        with self._out:
            self._file.close()

    def close(self) -> None:
        """Close the file; it is incomplete without :meth:`end`."""
        self._out.drop()
        self._file.close()


def write_sound(file: IO[bytes], kind: str, rate: int, samples: np.ndarray) -> None:
    """Write samples [S] as a whole."""
    writer = SoundWriter(file, kind, rate)
    writer.add(samples)
    writer.end()


class SoundStream:
    """Encodes samples into bytes as they come.

    libsndfile rewrites the header at the end, when the length is known. If the first bytes were taken before, the
    stream keeps its first header, with an unknown length.
    """

    def __init__(self, kind: str, rate: int):
        self._whole = not KINDS[kind].streams
        self._sink = _Sink()
        self._sizes = _WAV_SIZES if kind == "wav" else ()
        self._writer = SoundWriter(self._sink, kind, rate)
        self._ended = False

    def add(self, samples: np.ndarray) -> None:
        """Encode float samples [S] from -1 to 1."""
        self._writer.add(samples)

    def end(self) -> None:
        self._writer.end()
        self._ended = True

    def take(self) -> bytes:
        """Return bytes that are ready and were not taken yet; none before the end if the header needs the length."""
        if self._whole and not self._ended:
            return b""
        if not self._ended and not self._sink.taken:
            for offset in self._sizes:
                struct.pack_into("<I", self._sink.data, offset, _UNKNOWN_SIZE)
        return self._sink.take()


class _DeferredErrors:
    """A file whose errors are raised at the end of a ``with`` block, because libsndfile loses errors of callbacks."""

    def __init__(self, file: IO[bytes] | _Sink):
        self._file: IO[bytes] | _Sink | None = file
        self._error: OSError | None = None

    def write(self, data: Any) -> int:  # whatever has bytes
        return self._call(lambda file: file.write(data) or 0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._call(lambda file: file.seek(offset, whence))

    def tell(self) -> int:
        return self._call(lambda file: file.tell())

    def drop(self) -> None:
        self._file = None

    def _call(self, call: Callable[[Any], int]) -> int:
        if self._file is None or self._error is not None:
            return 0
        try:
            return call(self._file)
        except OSError as error:
            self._error = error
            return 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._error is not None:
            raise self._error


class _Sink:
    """A file whose bytes can be taken; later writes to taken bytes are dropped."""

    def __init__(self) -> None:
        self.data = bytearray()
        """The bytes that were not taken yet."""
        self.taken = 0
        """The number of bytes before them."""
        self._position = 0

    def take(self) -> bytes:
        data = bytes(self.data)
        self.data = bytearray()
        self.taken += len(data)
        return data

    def write(self, data: Any) -> int:  # whatever has bytes
        begin = self._position - self.taken
        size = len(data)
        self._position += size
        if begin >= 0:
            self.data[begin : begin + size] = data
        elif begin + size > 0:
            self.data[: begin + size] = data[-begin:]
        return size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origins: dict[int, Callable[[], int]] = {
            io.SEEK_SET: int, io.SEEK_CUR: self.tell, io.SEEK_END: lambda: self.taken + len(self.data)}
        self._position = origins[whence]() + offset
        return self._position

    def tell(self) -> int:
        return self._position
