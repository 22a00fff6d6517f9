"""The true length of an MP3 without a tag, and whether seeking in it is exact: both are unknown to libsndfile.

Without a Xing or Info tag libsndfile guesses the length from the first frame's bit rate and reads no further, so a
recording of variable bit rate loses its end (or gets silence there). In a file of variable bit rate it seeks by the
tag's coarse table, tens of milliseconds off. The frame headers answer both questions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

#: kbit/s by index, for MPEG 1 and for MPEG 2 and 2.5, layer III.
_RATES_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_RATES_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_HERTZ = (44_100, 48_000, 32_000)
#: Bytes in which a frame is searched after damaged ones; without any, the rest counts as something other than audio.
_RESYNC_BYTES = 4096
_MANY_BYTES = 1 << 26


class Frame(NamedTuple):
    """A frame header of layer III."""

    size: int
    samples: int
    side: int
    """Bytes of side information (and checksum) between the header and what follows."""


class Mp3(NamedTuple):
    """What the headers of an MP3 say about its length."""

    frames: int
    """Counted, or from the tag."""
    samples: int
    constant: bool
    """Whether all frames have the same bit rate."""
    tagged: bool
    """Whether a tag has the number of frames, so libsndfile knows it too."""
    first: int
    """Offset of the first frame in bytes."""


def inspect(read: Callable[[int, int], bytes]) -> Mp3 | None:
    """Examine an MP3 through ``read(count, offset)``; None if it has no whole frame.

    With a tag that has the number of frames, one short read is enough (two if there is an ID3 tag); without one, all
    frame headers are read.
    """
    head = read(_RESYNC_BYTES, 0)
    start = after_id3(head)
    if start:
        head = read(_RESYNC_BYTES, start)
    at = _next_frame(head)
    if at is None:
        return None
    frame = frame_at(head, at)
    assert frame is not None, "one begins there"
    tag = head[at + 4 + frame.side : at + 16 + frame.side]
    if tag[:4] in (b"Xing", b"Info") and tag[7] & 1 and (count := int.from_bytes(tag[8:12], "big")):
        return Mp3(count, count * frame.samples, tag[:4] == b"Info", True, start + at)
    if head[at + 36 : at + 40] == b"VBRI":
        count = int.from_bytes(head[at + 50 : at + 54], "big")
        return Mp3(count, count * frame.samples, False, True, start + at)
    data = read_all(read, start)
    first = start + at
    frames = 0
    samples = 0
    sizes = set()
    while (frame := frame_at(data, at)) is not None and at + frame.size <= len(data):
        frames = frames + 1
        samples = samples + frame.samples
        sizes.add(frame.size & ~1)  # padding makes a frame of constant bit rate one byte longer
        at += frame.size
        if frame_at(data, at) is None:
            distance = _next_frame(data[at : at + _RESYNC_BYTES])
            if distance is None:
                break
            at += distance
    return Mp3(frames, samples, len(sizes) <= 2, False, first) if frames else None  # without, the only one is cut off


def read_all(read: Callable[[int, int], bytes], start: int = 0) -> bytes:
    """All bytes from ``start`` on, in several reads if one returns fewer bytes than requested."""
    parts = []
    while part := read(_MANY_BYTES, start):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def with_tag(data: bytes, mp3: Mp3) -> bytes:
    """The same MP3 with a Xing tag in front that has the number of frames."""
    frame = frame_at(data, mp3.first)
    assert frame is not None, "it was found there"
    header = bytearray(data[mp3.first : mp3.first + 4])
    header[1] |= 1  # no checksum
    header[2] = (header[2] & 0x0F) | 0xE0  # the largest bit rate: room for the tag
    tag = bytes(header)
    tagged = frame_at(tag, 0)
    assert tagged is not None, "a header of a known rate is a frame's"
    side = frame.side if data[mp3.first + 1] & 1 else frame.side - 2
    body = tag + bytes(side) + b"Xing" + (1).to_bytes(4, "big") + mp3.frames.to_bytes(4, "big")
    return body.ljust(tagged.size, b"\0") + data[mp3.first :]


def after_id3(head: bytes) -> int:
    """Return the offset behind an ID3 tag at the beginning of a file; 0 without one."""
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    size = 0
    for byte in head[6:10]:  # seven bits each
        size = size << 7 | byte & 0x7F
    return 10 + size + (10 if head[5] & 0x10 else 0)


def _next_frame(data: bytes) -> int | None:
    """Offset of the first frame: a header that is followed by another one or by the end of the data."""
    at = 0
    while (at := data.find(b"\xff", at)) >= 0:
        frame = frame_at(data, at)
        if frame is not None and (at + frame.size + 4 > len(data) or frame_at(data, at + frame.size)):
            return at
        at += 1
    return None


def frame_at(data: bytes, at: int) -> Frame | None:
    """The frame header at an offset; None if there is none."""
    if at + 4 > len(data) or data[at] != 0xFF or data[at + 1] & 0xE6 != 0xE2:  # sync, layer III
        return None
    version = data[at + 1] >> 3 & 3
    rate = data[at + 2] >> 4
    hertz = data[at + 2] >> 2 & 3
    if version == 1 or rate in (0, 15) or hertz == 3:
        return None
    newest = version == 3
    mono = data[at + 3] >> 6 == 3
    side = (17 if mono else 32) if newest else (9 if mono else 17)
    hertz = _HERTZ[hertz] >> (0 if newest else 1 if version == 2 else 2)
    bits = (_RATES_1 if newest else _RATES_2)[rate] * 1000
    samples = 1152 if newest else 576
    size = samples // 8 * bits // hertz + (data[at + 2] >> 1 & 1)
    return Frame(size, samples, side + (0 if data[at + 1] & 1 else 2))
