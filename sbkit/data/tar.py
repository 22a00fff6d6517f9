"""Writes uncompressed tars, whose members a manifest can point to by offset and size."""

from __future__ import annotations

import tarfile
from pathlib import PurePosixPath
from typing import IO, NamedTuple

from sbkit.data import mp3


class SoundKind(NamedTuple):
    """A kind of file: its name, its suffix, and the bytes that identify it, each with its offset."""

    name: str
    suffix: str
    marks: tuple[tuple[int, bytes], ...]


_MP3 = SoundKind("MP3", "mp3", ((0, b"ID3"),))
_AAC = SoundKind("AAC", "aac", ())
#: Enough to know each kind: AAC's longest frame, and the header of the next.
BEGIN = (1 << 13) + 6
KINDS = (
    SoundKind("WAV", "wav", ((0, b"RIFF"), (0, b"RF64"))), SoundKind("FLAC", "flac", ((0, b"fLaC"),)),
    SoundKind("Ogg (Vorbis, Opus)", "ogg", ((0, b"OggS"),)), _MP3, SoundKind("AIFF", "aiff", ((0, b"FORM"),)),
    SoundKind("WebM", "webm", ((0, b"\x1a\x45\xdf\xa3"),)), SoundKind("MP4", "m4a", ((4, b"ftyp"),)),
    SoundKind("CAF", "caf", ((0, b"caff"),)), SoundKind("AU", "au", ((0, b".snd"),)),
    SoundKind("AMR", "amr", ((0, b"#!AMR"),)),
)


def kind_of(begin: bytes) -> SoundKind | None:
    """Return the kind of file that begins like this; None if unknown. An MP3 without a tag, and AAC, begin with two
    frames."""
    if len(begin) > 6 and begin[0] == 0xFF and begin[1] & 0xF6 == 0xF0:  # ADTS: "layer" 0, then a frame's size
        size = (begin[3] & 3) << 11 | begin[4] << 3 | begin[5] >> 5
        return _AAC if size > 6 and begin[size : size + 2] == begin[:2] else None
    for kind in KINDS:
        if any(begin[at:].startswith(mark) for at, mark in kind.marks):
            return kind
    frame = mp3.frame_at(begin, 0)
    # A single header may occur in samples.
    two = frame is not None and len(begin) > frame.size + 1 and begin[frame.size : frame.size + 2] == begin[:2]
    return _MP3 if two else None


BLOCK = 512
#: The end of a tar.
END = bytes(2 * BLOCK)


def suffix(data: bytes, path: str) -> str:
    """The suffix for a member's name: by its data, else by the name of its file, else "audio"."""
    if (kind := kind_of(data)) is not None:
        return kind.suffix
    called = PurePosixPath(path).suffix[1:].lower()
    return called if called.isalnum() and called.isascii() and len(called) <= 5 else "audio"


def append(file: IO[bytes], name: str, data: bytes) -> int:
    """Append a member and return by how many bytes the tar grew. The data begin after a header of one ``BLOCK``."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    padding = -len(data) % BLOCK
    file.write(member.tobuf(tarfile.USTAR_FORMAT))
    file.write(data)
    file.write(bytes(padding))
    return BLOCK + len(data) + padding
