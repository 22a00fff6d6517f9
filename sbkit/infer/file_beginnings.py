"""How files of sound begin: what is sent as samples may be a file all the same, and would be heard as noise."""

from __future__ import annotations

#: Kinds of files, and the place and the bytes by which they are known.
_MAGIC = {
    "WAV": ((0, b"RIFF"), (0, b"RF64")), "FLAC": ((0, b"fLaC"),), "Ogg (Vorbis, Opus)": ((0, b"OggS"),),
    "MP3": ((0, b"ID3"),), "AIFF": ((0, b"FORM"),), "WebM": ((0, b"\x1a\x45\xdf\xa3"),), "MP4": ((4, b"ftyp"),),
    "CAF": ((0, b"caff"),), "AU": ((0, b".snd"),), "AMR": ((0, b"#!AMR"),),
}
#: Kilobits per second of an MP3's frame, in MPEG-1 and in the later halves of its rates.
_KILOBITS = ((32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
             (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160))
_HERTZ = (44_100, 48_000, 32_000)
_LONGEST = 1_443  # the longest frame of an MP3, and the beginning of the next


class Beginning:
    """Looks at the first bytes of one stream, as they come."""

    def __init__(self) -> None:
        self._seen = b""

    def file(self, data: bytes) -> str | None:
        """Take the next bytes, and return the kind of file that the stream is, if it is one."""
        if len(self._seen) >= _LONGEST:
            return None
        self._seen += data[: _LONGEST - len(self._seen)]
        return file_of(self._seen)


def file_of(begin: bytes) -> str | None:
    """Return the kind of file that begins like this; None for samples."""
    kinds = (kind for kind, marks in _MAGIC.items() if any(begin[at:].startswith(magic) for at, magic in marks))
    return next(kinds, "MP3" if _two_frames(begin) else None)


def _two_frames(begin: bytes) -> bool:
    """Whether this is a frame of an MP3 and the beginning of another: one alone may well be a sample."""
    if len(begin) < 4 or begin[0] != 0xFF or begin[1] & 0xE6 != 0xE2:  # its mark and its layer
        return False
    version, kilobits, hertz = begin[1] >> 3 & 3, begin[2] >> 4, begin[2] >> 2 & 3
    if version == 1 or kilobits in (0, 15) or hertz == 3:
        return False
    first = version == 3
    rate = _HERTZ[hertz] // {3: 1, 2: 2, 0: 4}[version]
    size = (144_000 if first else 72_000) * _KILOBITS[not first][kilobits - 1] // rate + (begin[2] >> 1 & 1)
    return len(begin) > size + 1 and begin[size : size + 2] == begin[:2]
