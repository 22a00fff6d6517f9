"""Members of uncompressed tars, written such that a manifest can point at their bytes."""

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
    """What a member's name should end with: what its data are, else what its file was called, else "audio"."""
    called = PurePosixPath(path).suffix[1:].lower()
    if not (called.isalnum() and called.isascii() and len(called) <= 5):
        called = "audio"
    return next((name for name, magic in _MAGIC.items() if data.startswith(magic)), called)


def append(file: IO[bytes], name: str, data: bytes) -> int:
    """Add a member; how many bytes the tar grew by. Its data begin one ``BLOCK`` in: USTAR headers have that size."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    padding = -len(data) % BLOCK
    file.write(member.tobuf(tarfile.USTAR_FORMAT))
    file.write(data)
    file.write(bytes(padding))
    return BLOCK + len(data) + padding
