"""The length of a recording by its header and by the content of its file, which differ if it was cut off or damaged.

libsndfile silently shortens a WAV to the audio in the file, and reads no further than the header says. A WAV that goes
on behind its data is read as its header says, as other programs do: some recorders overwrite a longer file and don't
truncate it. A header that says 0 bytes or the largest number was never completed, so that file is read to its end.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import soundfile

from sbkit.data import mp3

Read = Callable[[int, int], bytes]

#: In libsndfile's log: the bytes of audio (or of the file) by the header, and those that the file has.
_CLAIM = re.compile(r"^\s*(?:data|SSND|Data Size|riff|Riff size)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE)
#: A program that writes into a pipe doesn't know the size, and writes about the largest one instead.
_UNKNOWN_SIZE = 0x7FFF0000
_TAIL_BYTES = 1 << 16
_MAX_TAIL_BYTES = 1 << 23
#: Samples of a FLAC frame by the code in its header; with codes 6 and 7 their number follows.
_FLAC_SAMPLES = {1: 192, 2: 576, 3: 1152, 4: 2304, 5: 4608, **{code: 1 << code for code in range(8, 16)}}


def frames(file: soundfile.SoundFile, read: Read, size: int) -> tuple[int, int]:
    """Return the number of frames of an open recording by its header, and by the content of its file.

    read : returns ``count`` bytes from ``offset`` on, as ``read(count, offset)``
    size : of the file in bytes
    """
    declared = actual = file.frames
    if file.format == "FLAC":
        # The samples up to the end of the last frame, if that can be found: padding or a tag may follow it.
        at = mp3.after_id3(read(10, 0))
        if read(4, at) == b"fLaC":
            info = read(34, at + 8)
            tail = max(2 * int.from_bytes(info[7:10], "big"), _TAIL_BYTES)
            for most in (tail, 8 * tail, _MAX_TAIL_BYTES):
                begin = max(size - min(most, _MAX_TAIL_BYTES), 0)
                end = _flac_end(read(size, begin), int.from_bytes(info[2:4], "big"))
                if end is not None or not begin:
                    return declared, end or declared
        return declared, declared
    claim = _CLAIM.search(file.extra_info)
    if claim is not None and int(claim[1]) < _UNKNOWN_SIZE:
        declared = actual * int(claim[1]) // max(int(claim[2]), 1)
    elif file.format in ("WAV", "WAVEX"):
        _, held, behind = _wav(read, size)
        if held and any(read(_TAIL_BYTES, size - behind)):  # zeros are padding
            actual += actual * behind // held
    return declared, actual


def completed_wav(read: Read, size: int) -> bytes | None:
    """Return the bytes of a WAV whose header says 0 bytes of audio, with the largest number instead, which libsndfile
    reads to the end; None if no audio follows."""
    start, held, behind = _wav(read, size)
    if held or not behind:
        return None
    data = mp3.read_all(read)
    return data[: start + 4] + struct.pack("<I", 0xFFFFFFFF) + data[start + 8 :]


def _wav(read: Read, size: int) -> tuple[int, int, int]:
    """Return where the last data chunk of a WAV begins, its bytes of audio, and those behind it in no chunk."""
    at = 12
    start = 0
    held = 0
    while at + 8 <= size:
        name, length = struct.unpack("<4sI", read(8, at))
        if start and (not all(0x20 <= byte < 0x7F for byte in name) or at + 8 + length > size):
            return start, held, size - at
        if name == b"data":
            start = at
            held = length
        at += 8 + length + length % 2
    return start, held, 0


def _flac_end(tail: bytes, block: int) -> int | None:
    # A header's sync code with a valid checksum occurs in audio too, but not where another frame begins or ends.
    behind: dict[int, int] = {}
    at = len(tail)
    while (at := tail.rfind(b"\xff", 0, at)) >= 0:
        if (frame := _flac_frame(tail[at : at + 16], block)) is not None:
            first, samples = frame
            if first == 0 or first + samples in behind:
                return behind.get(first + samples, first + samples)
            behind[first] = first + samples
    return None


def _flac_frame(data: bytes, block: int) -> tuple[int, int] | None:
    """The first sample and the number of samples of the frame that begins here, if one does.

    block : samples of each frame but the last, where frames are numbered and not samples
    """
    if len(data) < 16 or data[1] & 0xFE != 0xF8 or data[2] & 0xF == 0xF or data[3] >> 4 > 10 or data[3] & 1:
        return None
    more = 0 if data[4] < 0x80 else 7 - (data[4] ^ 0xFF).bit_length()  # a number, encoded like UTF-8
    number = data[4] & (0x7F >> more + (more > 0))
    at = 5 + more
    code = data[2] >> 4
    rate = data[2] & 0xF
    for byte in data[5:at]:
        number = number << 6 | byte & 0x3F
    samples = _FLAC_SAMPLES.get(code, 0)
    if code in (6, 7):
        samples = int.from_bytes(data[at : at + code - 5], "big") + 1
        at += code - 5
    at += {12: 1, 13: 2, 14: 2}.get(rate, 0)
    checksum = 0
    for byte in data[: at + 1]:
        checksum ^= byte
        for _ in range(8):
            checksum = checksum << 1 ^ (0x107 if checksum & 0x80 else 0)
    return (number if data[1] & 1 else number * block, samples) if samples and not checksum else None
