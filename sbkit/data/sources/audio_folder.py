"""Folders of recordings without a list, for tasks that need no texts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from sbkit.data.audio import SUFFIXES
from sbkit.data.sources.base import Rows, Source, stamp
from sbkit.data.splits import ALIASES
from sbkit.errors import SbkitError

_SPLITS = {name for names in ALIASES.values() for name in names}


class AudioFolder(Source):
    """Recordings in a folder and its subfolders; an id is the relative path, without the suffix if that is unique.

    Folders that are named after splits (train, dev, validation, test, ...) are splits; without any, all is train.
    """

    kind = "recordings"

    def __init__(self, folder: Path):
        self.folder, self.where = folder, str(folder)
        below = sorted(each.name for each in folder.iterdir()
                       if each.is_dir() and each.name.lower() in _SPLITS and self.matches(each))
        self.splits = {name: folder / name for name in below} or {"train": folder}

    @staticmethod
    def matches(folder: Path) -> bool:
        """Whether there is a recording in a folder or below it."""
        return any(_is_recording(path) for path in folder.rglob("*"))

    def names(self) -> list[str]:
        return list(self.splits)

    def fingerprint(self) -> list[Any]:
        folders = {path.parent for folder in self.splits.values() for path in _recordings(folder)}
        return [self.kind, *map(stamp, sorted(folders))]

    def read(self, name: str, show_progress: bool = True) -> Rows:
        if self.needs_text:
            raise SbkitError(f"{self.folder} has recordings but no list with their transcripts",
                             hint="write a train.csv with the columns ID,duration,wav,wrd, or train.jsonl")
        folder = self.splits[name]
        paths = _recordings(folder)
        ids = [path.relative_to(folder).as_posix() for path in paths]
        stems = [each[: -len(path.suffix)] for each, path in zip(ids, paths, strict=True)]
        times = Counter(stems)
        named = [stem if times[stem] == 1 else whole for stem, whole in zip(stems, ids, strict=True)]
        return Rows(str(folder), named, [str(path.absolute()) for path in paths])


def _recordings(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if _is_recording(path))


def _is_recording(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()
