"""Members of uncompressed tars, written such that a manifest can point at their bytes."""

from __future__ import annotations

import tarfile
from typing import IO

BLOCK = 512
#: What a tar ends with.
END = bytes(2 * BLOCK)


def append(file: IO[bytes], name: str, data: bytes) -> int:
    """Add a member; how many bytes the tar grew by. Its data begin one ``BLOCK`` in: USTAR headers have that size."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    padding = -len(data) % BLOCK
    file.write(member.tobuf(tarfile.USTAR_FORMAT))
    file.write(data)
    file.write(bytes(padding))
    return BLOCK + len(data) + padding
