"""Whether a bundle's files are what its export wrote: sizes and hashes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.export.layout.config import Bundle
from sbkit.export.layout.names import README
from sbkit.system import disk, memory, untrusted

#: The most bytes of a bundle, as a multiple of this machine's memory: it has one model in several formats.
_MAX_MEMORIES = 4


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and the sha256 of a regular file."""
    with untrusted.open_regular(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": disk.sha256_of(file)}


def is_as_written(path: Path, written: Mapping[str, Any]) -> bool:
    """Return whether a regular file has the size and the sha256 that the export wrote.

    The size is compared first, so that a sparse file, which may have terabytes of zeros, isn't read.
    """
    with untrusted.open_regular(path) as file:
        return os.fstat(file.fileno()).st_size == written["bytes"] and disk.sha256_of(file) == written["sha256"]


def check_files(folder: Path, config: Bundle) -> None:
    """Raise unless a bundle's files are what the export wrote; README.md may be edited, and files may be missing.

    Its folder must have nothing that a reader could wait for without end, listed or not: pipes, devices, or more bytes
    than any model has that this machine can run.
    """
    sizes: dict[str, int] = {}
    try:
        for path in sorted(folder.iterdir()):
            if not path.is_dir():
                with untrusted.open_regular(path) as file:
                    sizes[path.name] = os.fstat(file.fileno()).st_size
        if sum(sizes.values()) > _MAX_MEMORIES * memory.total():
            raise SbkitError("bundle-too-large", f"the files of {folder} have {disk.size(sum(sizes.values()))}, and "
                             f"this machine has {disk.size(memory.total())} of memory",
                             hint="copy the bundle again, or use a machine with more memory", file=folder)
        for name, written in config.files.items():
            if name in sizes and name != README and not is_as_written(folder / name, written):
                raise SbkitError("damaged-bundle", f"{folder / name} is not what the export wrote",
                                 hint="copy the bundle again", file=folder / name)
    except OSError as error:
        raise SbkitError("damaged-bundle", f"{error.filename or folder} cannot be read: {error.strerror or error}",
                         hint="copy the bundle again", file=error.filename or folder) from None
