"""Recordings that libsndfile can't read (MP4 and M4A, WebM and Matroska, AAC), with the optional package av.

It holds FFmpeg's libraries, which open more than sound: playlists, other files, devices. Here a file's first bytes
choose one of three demuxers, no other one is tried, and only codecs of sound are opened. The length is counted from the
packets, which decodes nothing, because a header may lie or lack it, as that of a browser's recording does.
"""

from __future__ import annotations

import io
import os
import re
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

#: FFmpeg's demuxers by the names of ``sbkit.data.tar.KINDS``.
DEMUXERS = {"MP4": "mov", "WebM": "matroska", "AAC": "aac"}
CODECS = ("aac", "aac_fixed", "alac", "flac", "libopus", "mp3", "mp3float", "opus", "vorbis")
#: In an MP4's boxes: how many packets it has, which need no bytes of their own in the list if all have one size.
_COUNT = re.compile(rb"(?=st(?:sz|z2).{8}(.{4})|trun.{4}(.{4}))", re.DOTALL)


class ContainerError(ValueError):
    """Raised for a container that can't be read; ``code`` is that of the error that the user gets."""

    def __init__(self, code: str, cause: str):
        super().__init__(cause)
        self.code = code


class ContainerFile:
    """The first audio stream of a file, with what ``sbkit.data.audio`` uses of ``soundfile.SoundFile``; read once, from
    the beginning.

    source : a descriptor, which stays open, or the bytes of the file
    kind : one of ``DEMUXERS``

    Raises ``ContainerError`` if there is no such package, or nothing that can be decoded.
    """

    subtype = extra_info = ""

    def __init__(self, source: int | bytes, kind: str):
        try:
            import av
        except ImportError:
            raise ContainerError("missing-package", f"is {kind} audio, which needs the package av: pip install "
                                 "'sbkit[av]'") from None
        self.format = kind
        self._av = av
        self._file = os.fdopen(source, "rb", closefd=False) if isinstance(source, int) else io.BytesIO(source)
        self._left = np.zeros((0, 1), np.float32)
        """What was decoded and not read yet."""
        self._blocks = self._decode()
        if kind == "MP4":
            self._check_packet_counts()
        try:
            with self._open() as opened:
                stream = opened.streams.best("audio")
                if stream is None:
                    raise ContainerError("empty-audio", "holds no audio")
                codec = stream.codec_context  # None: FFmpeg itself doesn't know it
                if codec is None or codec.name not in CODECS:
                    raise ContainerError("unknown-audio-format", "holds audio of a kind that isn't decoded "
                                         f"({codec.name if codec else 'unknown'})")
                self.samplerate = codec.sample_rate
                self.channels = codec.channels
                seconds = float(stream.duration * stream.time_base) if stream.duration else \
                    (opened.duration or 0) / av.time_base
                # What begins before 0 is the encoder's delay. Gaps between packets are not filled when it is decoded.
                length = sum(min(packet.duration, max(0, packet.duration + (packet.pts or 0)))
                             for packet in opened.demux(stream) if packet.duration)
                self.frames = int(length * stream.time_base * self.samplerate)
                # AAC has no header for the whole file, so the length that FFmpeg gives is an estimate.
                self.declared = max(self.frames, 0 if kind == "AAC" else round(seconds * self.samplerate))
        except av.FFmpegError as error:
            raise ContainerError("damaged-audio", f"cannot be decoded: damaged or cut off ({error.strerror})") from None

    def _check_packet_counts(self) -> None:
        """Refuse an MP4 that claims more packets than it has bytes, since FFmpeg takes memory for each claimed one."""
        size = self._file.seek(0, os.SEEK_END)
        listed = 0
        in_fragments = 0
        has_fragments = False
        at = 0
        while at + 8 <= size:
            self._file.seek(at)
            length, name = struct.unpack(">I4s", self._file.read(8))
            if length == 1:  # the length follows
                length = int.from_bytes(self._file.read(8), "big")
            if length < 8:  # 0: the last box, which goes on to the end
                length = size - at
            self._file.seek(at)
            box = b"" if name == b"mdat" else self._file.read(min(length, size))  # a length may be any of 64 bits
            if b"cmvd" in box:  # of QuickTime files of old
                raise ContainerError("damaged-audio", "cannot be decoded: its list of packets is compressed, and may "
                                     "claim any number")
            for match in _COUNT.finditer(box):
                if match[1] is not None:
                    listed += int.from_bytes(match[1], "big")
                else:
                    in_fragments += int.from_bytes(match[2], "big")
            if b"tfhd" in box:
                has_fragments = True
            at += length
        # Without a fragment's header, what looks like a fragment's list is a word of a title.
        if listed + (in_fragments if has_fragments else 0) > size:
            raise ContainerError("damaged-audio", "cannot be decoded: damaged (it claims more packets than it has "
                                 "bytes)")

    def _open(self) -> Any:  # av has types only where it is installed
        self._file.seek(0)
        opened = self._av.open(self._file, format=DEMUXERS[self.format],
                               container_options={"codec_whitelist": ",".join(CODECS)})
        for stream in opened.streams.audio:
            if stream.codec_context is not None:
                stream.codec_context.thread_count = 1
        return opened

    def _decode(self) -> Iterator[np.ndarray]:
        """Decode blocks [S, C] up to what is damaged; the reader notices that samples are missing."""
        try:
            with self._open() as opened:
                # One rate and layout, also if the stream changes them, and floats from whatever the codec decodes to.
                resampler = self._av.AudioResampler(format="flt", rate=self.samplerate)
                for frame in opened.decode(opened.streams.best("audio")):
                    for block in resampler.resample(frame):
                        yield block.to_ndarray().reshape(-1, block.layout.nb_channels)
        except (self._av.FFmpegError, ValueError):
            return

    def read(self, frames: int, dtype: str = "float32", always_2d: bool = True) -> np.ndarray:
        """Return the next samples [S, C], at most ``frames``; fewer at the end."""
        parts = [self._left]
        held = len(self._left)
        while held < frames and (block := next(self._blocks, None)) is not None:
            parts.append(block)
            held += len(block)
        signal = np.concatenate([part for part in parts if len(part)] or parts[:1])
        self._left = signal[frames:]
        return signal[:frames]

    def close(self) -> None:
        self._blocks = iter(())
        self._file.close()
