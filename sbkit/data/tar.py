"""Writes uncompressed tars, whose members a manifest can point to by offset and size."""

from __future__ import annotations

import tarfile
from pathlib import PurePosixPath
from typing import IO

BLOCK = 512
#: What a tar ends with.
END = bytes(2 * BLOCK)
_MAGIC: dict[str, bytes | tuple[bytes, ...]] = {
    "wav": b"RIFF", "flac": b"fLaC", "ogg": b"OggS", "mp3": (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"),
}


def suffix(data: bytes, path: str) -> str:
    """The suffix for a member's name: by its data, else by the name of its file, else "audio"."""
    called = PurePosixPath(path).suffix[1:].lower()
    if not (called.isalnum() and called.isascii() and len(called) <= 5):
        called = "audio"
    return next((name for name, magic in _MAGIC.items() if data.startswith(magic)), called)


def append(file: IO[bytes], name: str, data: bytes) -> int:
    """Append a member and return by how many bytes the tar grew. The data begin after a header of one ``BLOCK``."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    padding = -len(data) % BLOCK
    file.write(member.tobuf(tarfile.USTAR_FORMAT))
    file.write(data)
    file.write(bytes(padding))
    return BLOCK + len(data) + padding
