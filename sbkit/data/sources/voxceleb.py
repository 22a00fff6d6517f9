"""VoxCeleb as unpacked: a folder per speaker, with a folder per video, with recordings."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sbkit.data.audio import SUFFIXES
from sbkit.data.sources.base import Rows, Source, stamp
from sbkit.data.splits import SPLITS
from sbkit.errors import SbkitError

_SPEAKER = re.compile(r"id(\d{5})")
_DEPTH = 4  # folders down to the speakers', such as VoxCeleb1/dev/wav/id10001
#: The speakers of VoxCeleb1's test set, whose names begin with an E.
_TEST = range(10270, 10310)
#: The share of the other speakers in dev, and their minimum number.
SHARE, MIN_SPEAKERS = 0.02, 2


class VoxCeleb(Source):
    """VoxCeleb 1, 2 or both: ``.../id10270/5r0dWxy17C8/00001.wav``; the id is these three parts without the suffix, as
    in lists of trials.

    - Test has the speakers below a folder ``test``, and VoxCeleb1's 40 test speakers in any folder.
    - Dev has the 2 % of the other speakers with the smallest hashes, and train the rest.
    """

    kind = "VoxCeleb"

    def __init__(self, folder: Path):
        self.folder, self.where = folder, str(folder)

    @staticmethod
    def matches(folder: Path) -> bool:
        """Whether a folder has folders of speakers with recordings in those of videos."""
        return any(next(_recordings(speaker), None) for speaker in _speakers(folder))

    def names(self) -> list[str]:
        return list(SPLITS)

    def fingerprint(self) -> list[Any]:
        return [self.kind, *(stamp(video) for speaker in _speakers(self.folder) for video in sorted(speaker.iterdir()))]

    def read(self, name: str, show_progress: bool = True) -> Rows:
        if self.needs_text:
            raise SbkitError(f"{self.folder} is VoxCeleb, which has no transcripts")
        paths = [path for speaker in self._split()[name] for path in sorted(_recordings(speaker))]
        return Rows(
            f"{self.folder} [{name}]", ["/".join(path.with_suffix("").parts[-3:]) for path in paths],
            [str(path.absolute()) for path in paths], speakers=[path.parts[-3] for path in paths])

    def _split(self) -> dict[str, list[Path]]:
        """The folders of each split's speakers."""
        found: dict[str, list[Path]] = {split: [] for split in SPLITS}
        known: dict[str, list[Path]] = {}
        for path in _speakers(self.folder):
            if "test" in path.relative_to(self.folder).parts or int(path.name[2:]) in _TEST:
                found["test"].append(path)
            else:
                known.setdefault(path.name, []).append(path)
        drawn = sorted(known, key=lambda name: hashlib.sha256(name.encode()).digest())
        count = max(MIN_SPEAKERS, round(SHARE * len(drawn)))
        for number, name in enumerate(drawn):
            found["dev" if number < count else "train"] += known[name]
        return {split: sorted(paths) for split, paths in found.items()}


def _speakers(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Find the speakers' folders below a folder."""
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        if _SPEAKER.fullmatch(path.name):
            yield path
        elif depth > 1:
            yield from _speakers(path, depth - 1)


def _recordings(speaker: Path) -> Iterator[Path]:
    return (path for path in speaker.glob("*/*") if path.suffix.lower() in SUFFIXES)
