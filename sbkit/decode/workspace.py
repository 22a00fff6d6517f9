"""Large arrays in files instead of memory, for models of more text than the memory holds."""

from __future__ import annotations

import io
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import DTypeLike

#: Rows of an array that are computed at once, which bounds the memory: some hundred bytes are in use for each.
CHUNK = 1 << 21


def chunks(count: int) -> Iterator[slice]:
    """Yield slices that together cover ``count`` rows."""
    for first in range(0, count, CHUNK):
        yield slice(first, min(first + CHUNK, count))


def add_by_row(sums: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    """Add each value to its row's sum; the rows are sorted, so that only a stretch of the sums is touched."""
    if len(rows):
        first = int(rows[0])
        last = int(rows[-1])
        sums[first:last + 1] += np.bincount(rows - first, weights=values)


class Workspace:
    """Makes arrays: small ones in memory, larger ones in files without names, which end with their arrays.

    The kernel keeps as much of a file in memory as there is room for, and writes back the rest.

    folder : where the files are, on a disk rather than in memory; None: all arrays are in memory
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None):
        self.folder = None if folder is None else Path(folder)

    def empty(self, count: int, dtype: DTypeLike) -> np.ndarray:
        """Return an uninitialised array of one dimension."""
        size = count * np.dtype(dtype).itemsize
        if self.folder is None or count <= CHUNK:
            return np.empty(count, dtype)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and a crash in a mapped file
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS
                file.truncate(size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), dtype)

    def full(self, count: int, value: float, dtype: DTypeLike) -> np.ndarray:
        """Return an array of equal values."""
        array = self.empty(count, dtype)
        for part in chunks(count):
            array[part] = value
        return array


class Appended:
    """An array of unknown length that is written from its beginning to its end.

    files : where it is
    """

    def __init__(self, files: Workspace, dtype: DTypeLike):
        self._dtype = np.dtype(dtype)
        self._file: BinaryIO = io.BytesIO() if files.folder is None else tempfile.TemporaryFile(dir=files.folder)  # noqa: SIM115
        self.count = 0

    def add(self, values: np.ndarray) -> None:
        """Write values at the end."""
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self.count += len(values)

    def finish(self) -> np.ndarray:
        """Return the array; nothing more can be added."""
        if isinstance(self._file, io.BytesIO):
            return np.frombuffer(self._file.getbuffer(), self._dtype)
        with self._file as file:
            file.flush()
            if self.count <= CHUNK:
                file.seek(0)
                return np.frombuffer(bytearray(file.read()), self._dtype)
            return np.frombuffer(mmap.mmap(file.fileno(), self.count * self._dtype.itemsize), self._dtype)
