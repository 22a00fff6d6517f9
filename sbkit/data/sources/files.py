"""Sources with one file per split: ``train.csv``, ``dev.csv``, ``test.csv``, or a mapping of splits to files."""

from __future__ import annotations

import codecs
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from sbkit.data.manifest import Column, join, replace_data_root
from sbkit.data.sources.base import Rows, Source, join_rows, stamp
from sbkit.errors import SbkitError
from sbkit.system import untrusted

#: Longest line of an utterance.
MAX_LINE_BYTES = 1 << 24


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each non-blank line, as bytes, so that one that isn't UTF-8 doesn't affect others."""
    try:
        with untrusted.open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                content = stripped(line)
                if content:
                    yield number, content
    except OSError as error:
        raise SbkitError("not-readable", f"{path}: cannot be read ({error.strerror or error})", file=path) from None


def stripped(text: bytes) -> bytes:
    return text.removeprefix(codecs.BOM_UTF8).strip()


class FileSource(Source):
    """Base of sources with one file per split, given as ``files`` by name; subclasses read a file."""

    suffixes: tuple[str, ...] = ()

    def __init__(self, files: Mapping[str, Path], columns: Mapping[str, str],
                 data_root: str | Path | None = None):
        self.files = {name: Path(path) for name, path in files.items()}
        self.columns = columns
        self.data_root = data_root
        self.where = os.path.commonpath(self.folders)

    @property
    def folders(self) -> list[str]:
        return [str(path.absolute().parent) for path in self.files.values()]

    @classmethod
    def in_folder(cls, folder: Path) -> dict[str, Path]:
        """The files of this kind in a folder, by their names without suffix."""
        return {path.name[: -len(suffix)]: path for suffix in reversed(cls.suffixes)
                for path in sorted(folder.glob(f"*{suffix}"))}

    def names(self) -> list[str]:
        return list(self.files)

    def fingerprint(self) -> list[Any]:
        return [self.kind, [[name, stamp(path)] for name, path in self.files.items()]]

    def read(self, name: str, show_progress: bool = True) -> Rows:
        return self.read_file(self.files[name], show_progress)

    def files_of(self, name: str) -> list[Path]:
        return [self.files[name]]

    @abstractmethod
    def read_file(self, path: Path, show_progress: bool) -> Rows:
        """The rows of one file."""

    def with_paths(self, meta: Mapping[str, Column], file: Path) -> dict[str, Column]:
        """Return further columns, those of recordings with absolute paths."""
        return {name: self.locate(column, file) if self.wanted.get(name) else column for name, column in meta.items()}

    def locate(self, wavs: Column, file: Path) -> Column:
        """Make paths absolute: ``$data_root`` and relative ones start from ``data_root``, by default the file's folder.

        If the first relative path only exists below the working directory, all relative paths start from there.
        """
        root = str(file.parent if self.data_root is None else self.data_root)
        if "://" not in root:  # unless in an object store
            root = os.path.abspath(root)
        paths = replace_data_root(wavs.arrow, root)
        relative = pc.invert(pc.or_(pc.starts_with(paths, "/"), pc.match_substring(paths, "://")))
        if pc.any(relative).as_py():
            first = paths.filter(relative)[0].as_py().split("?")[0]
            in_root = os.path.exists(os.path.join(root, first))
            in_working_directory = os.path.exists(os.path.abspath(first))
            start = os.getcwd() if in_working_directory and not in_root else root
            paths = pc.if_else(relative, join(start.rstrip("/") + "/", paths), paths)
        return Column(paths)


class Mixed(Source):
    """A source of several files per split, possibly of different kinds, from a mapping of splits to files."""

    kind = "files"

    def __init__(self, parts: Mapping[str, Sequence[Source]]):
        self.parts = dict(parts)
        self.kind = " + ".join(dict.fromkeys(part.kind for part in self._all_parts()))
        self.where = ", ".join(dict.fromkeys(part.where for part in self._all_parts()))
        self.recorded = all(part.recorded for part in self._all_parts())

    def _all_parts(self) -> Iterator[Source]:
        return (part for of_split in self.parts.values() for part in of_split)

    @property
    def folders(self) -> list[str]:
        return [folder for part in self._all_parts() for folder in part.folders]

    def names(self) -> list[str]:
        return list(self.parts)

    def fingerprint(self) -> list[Any]:
        return [[name, *(part.fingerprint() for part in of_split)] for name, of_split in self.parts.items()]

    def intact(self) -> bool:
        return all(part.intact() for part in self._all_parts())

    def check_list(self, name: str) -> None:
        for part in self.parts[name]:
            part.inherit_needs(self)
            part.check_list(part.names()[0])

    def read(self, name: str, show_progress: bool = True) -> Rows:
        for part in self.parts[name]:
            part.inherit_needs(self)
        return join_rows([part.read(part.names()[0], show_progress) for part in self.parts[name]])
