"""A disk of a few megabytes that a test can fill: a tmpfs, or where nothing may be mounted a limit on each file."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

REFUSED = r"(No space left on device|File too large)"


class Disk:
    """A folder, ``path``, whose disk is full within ``full()``."""

    def __init__(self, path: Path, mounted: bool):
        self.path, self.mounted = path, mounted

    @contextlib.contextmanager
    def full(self, left: int = 0) -> Iterator[None]:
        """``left``: bytes that are free all the same (of each file, where nothing could be mounted)."""
        if self.mounted:
            with self._filled(left):
                yield
        else:
            with _files_of(left):
                yield

    @contextlib.contextmanager
    def _filled(self, left: int) -> Iterator[None]:
        filler = self.path / "filler"
        try:
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            os.truncate(filler, max(filler.stat().st_size - left, 0))
            yield
        finally:
            filler.unlink()


@contextlib.contextmanager
def _files_of(size: int) -> Iterator[None]:
    """Python ignores the signal that comes with the error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int = 4) -> Iterator[Disk]:
    """Mounted at ``path`` within the block."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "sbkit-test", str(path)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield Disk(path, mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
