"""VoiceBank-DEMAND and corpora with its layout: recordings with the same names in a noisy and a clean folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbkit.data.audio import SUFFIXES
from sbkit.data.sources.base import Rows, Source, find_column, no_column, stamp
from sbkit.errors import SbkitError

#: The column of the clean recordings.
CLEAN = "clean_wav"
#: Speakers of the training set that are used as dev, as in SpeechBrain's recipe.
DEV_SPEAKERS = ("p226", "p287")
_TEST = "testset_wav"


class VoiceBank(Source):
    """Noisy recordings and clean ones of the same name: ``noisy_trainset_28spk_wav``, ``clean_trainset_28spk_wav``,
    ``noisy_testset_wav`` and ``clean_testset_wav``.

    - A file name begins with its speaker, ``p226_001.wav``. Two speakers of the training set are dev.
    - The training set may be another one, such as that of 56 speakers: it has every ``noisy_trainset_*_wav``.
    - There are no texts.
    """

    kind = "VoiceBank-DEMAND"

    def __init__(self, folder: Path, columns: Mapping[str, str]):
        self.folder, self.where, self.columns = folder, str(folder), columns

    @staticmethod
    def matches(folder: Path) -> bool:
        """Whether a folder has such folders."""
        return any(folder.glob("noisy_trainset*_wav")) or (folder / f"noisy_{_TEST}").is_dir()

    def names(self) -> list[str]:
        return [*(("train", "dev") if self._sets("train") else ()), *(("test",) if self._sets("test") else ())]

    def fingerprint(self) -> list[Any]:
        folders = sorted({path.parent for name in ("train", "test") for path in self._recordings(name)})
        return [self.kind, *(stamp(each) for noisy in folders for each in (noisy, self._clean(noisy)))]

    def header(self, name: str) -> list[str]:
        return ["id", "audio", "speaker", CLEAN]

    def read(self, name: str, show_progress: bool = True) -> Rows:
        if self.needs_text:
            raise SbkitError(f"{self.folder} has recordings but no transcripts",
                             hint="use this layout for tasks that need none")
        paths = self._recordings(name)
        if name != "test":
            paths = [path for path in paths if (_speaker(path) in DEV_SPEAKERS) == (name == "dev")]
        clean = [str(self._clean(path.parent) / path.name) for path in paths]
        roles = {role: find_column(role, self.header(name), self.columns) for role in self.wanted}
        if missing := [role for role, column in roles.items() if column is None]:
            raise no_column(self.where, missing[0], self.header(name), self.columns)
        return Rows(f"{self.folder} [{name}]", [path.stem for path in paths], list(map(str, paths)),
                    speakers=[_speaker(path) for path in paths],
                    meta={role: clean for role, column in roles.items() if column == CLEAN})

    def _sets(self, name: str) -> list[Path]:
        found = [self.folder / f"noisy_{_TEST}"] if name == "test" else self.folder.glob("noisy_trainset*_wav")
        return sorted(path for path in found if path.is_dir())

    def _recordings(self, name: str) -> list[Path]:
        return sorted(path.absolute() for folder in self._sets(name) for path in folder.iterdir()
                      if path.suffix.lower() in SUFFIXES)

    @staticmethod
    def _clean(noisy: Path) -> Path:
        return noisy.with_name(f"clean_{noisy.name.removeprefix('noisy_')}")


def _speaker(path: Path) -> str:
    return path.name.partition("_")[0]
