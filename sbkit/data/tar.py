"""Writes uncompressed tars, whose members a manifest can point to by offset and size."""

from __future__ import annotations

import tarfile
from pathlib import PurePosixPath
from typing import IO

from sbkit.data.sound_kinds import kind_of

BLOCK = 512
#: What a tar ends with.
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
