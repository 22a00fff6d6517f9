"""Folders whose layout says what they are: LibriSpeech, VoxCeleb, VoiceBank-DEMAND, and recordings alone."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sbkit.data.audio import SUFFIXES
from sbkit.data.sources.base import Rows, Source, find_column, no_column, stamp
from sbkit.data.sources.files import lines
from sbkit.data.splits import ALIASES, SPLITS
from sbkit.errors import is_storable, shown

_WITHOUT = "use this layout for tasks that need none, such as hparams/speaker.yaml and enhance.yaml"


def _recordings(folder: Path, pattern: str) -> Iterator[Path]:
    return (path for path in folder.glob(pattern) if path.suffix.lower() in SUFFIXES)


class AudioFolder(Source):
    """Recordings in a folder and its subfolders, without a list; an id is the relative path, without the suffix if that
    is unique.

    Folders that are named after splits (train, dev, validation, test, ...) are splits; without any, all is train.
    """

    kind = "recordings"
    no_texts = ("has recordings but no list with their transcripts",
                "write a train.csv with the columns ID,duration,wav,wrd, or train.jsonl")

    def __init__(self, folder: Path):
        self.folder = folder
        self.where = str(folder)
        lists_above = [name for name in ("train.tsv", "train.csv", "train.jsonl", "train.json")
                       if (folder.resolve().parent / name).is_file()]
        if lists_above:  # the recordings of a corpus
            message, _ = self.no_texts
            self.no_texts = (message, f"name the folder above it, which has a {lists_above[0]}")
        split_names = {name for names in ALIASES.values() for name in names}
        split_folders = sorted(path for path in folder.iterdir()
                               if path.is_dir() and path.name.lower() in split_names and self.matches(path))
        self.splits = {path.name: path for path in split_folders} or {"train": folder}

    @staticmethod
    def matches(folder: Path) -> bool:
        """Whether there is a recording in a folder or below it."""
        return any(path.is_file() for path in _recordings(folder, "**/*"))

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        return sorted(path for path in _recordings(folder, "**/*") if path.is_file())

    def names(self) -> list[str]:
        return list(self.splits)

    def fingerprint(self) -> list[Any]:
        folders = {path.parent for folder in self.splits.values() for path in self._files(folder)}
        return [self.kind, *map(stamp, sorted(folders))]

    def read(self, name: str, show_progress: bool = True) -> Rows:
        self.check_texts()
        folder = self.splits[name]
        paths = self._files(folder)
        relative_paths = [path.relative_to(folder) for path in paths]
        counts = Counter(path.with_suffix("") for path in relative_paths)
        ids = []
        for path in relative_paths:
            stem = path.with_suffix("")
            ids.append((stem if counts[stem] == 1 else path).as_posix())
        return Rows(str(folder), ids, [str(path.absolute()) for path in paths])


class LibriSpeech(Source):
    """LibriSpeech as unpacked, or the folder in which it is: ``train-clean-100/SPEAKER/CHAPTER/`` with recordings and a
    list ``SPEAKER-CHAPTER.trans.txt`` of lines ``ID TEXT``.

    Train has every ``train-*``; dev is ``dev-clean`` and test ``test-clean`` if there is one, otherwise the other. A
    corpus's ``splits`` may name folders instead, ``{test: test-other}``.
    """

    kind = "LibriSpeech"
    recorded = True

    def __init__(self, folder: Path):
        inside = folder / "LibriSpeech"
        self.folder = inside if inside.is_dir() else folder
        self.where = str(self.folder)
        parts = sorted({path.parents[2].name for path in self._lists(self.folder, "*")})
        self.parts = {name: [name] for name in parts}
        for split in SPLITS:
            of_split = [name for name in parts if name.startswith(f"{split}-")]
            if of_split:
                self.parts[split] = of_split if split == "train" else of_split[:1]  # "clean" comes before "other"

    @classmethod
    def matches(cls, folder: Path) -> bool:
        """Whether a folder has a part with such a list."""
        inside = folder / "LibriSpeech"
        return any(cls._lists(inside if inside.is_dir() else folder, "*"))

    @staticmethod
    def _lists(folder: Path, pattern: str) -> Iterator[Path]:
        """Find the lists of the chapters in the parts whose names match a pattern."""
        for part in folder.glob(pattern):
            if re.match(r"(train|dev|test)-", part.name):
                yield from part.glob("*/*/*.trans.txt")

    def names(self) -> list[str]:
        return list(self.parts)

    def fingerprint(self) -> list[Any]:
        lists = sorted(self._lists(self.folder, "*"))
        return [self.kind, *(stamp(file_or_folder) for path in lists for file_or_folder in (path, path.parent))]

    def read(self, name: str, show_progress: bool = True) -> Rows:
        ids = []
        wavs = []
        texts = []
        speakers = []
        malformed: list[tuple[str, str]] = []
        for path in sorted(path for part in self.parts[name] for path in self._lists(self.folder, part)):
            recordings = {recording.stem: str(recording.absolute()) for recording in _recordings(path.parent, "*")}
            for number, line in lines(path):
                try:
                    clip, *text = line.decode("utf-8").split(maxsplit=1)
                except UnicodeDecodeError:
                    malformed.append((f"{path.name} line {number}", "not UTF-8"))
                    continue
                if "/" in clip or not is_storable(clip):  # it is the name of a file beside the list
                    malformed.append((f"{path.name} line {number}", f"the id {shown(clip)} can't name a recording"))
                    continue
                ids.append(clip)
                wavs.append(recordings.get(clip, str(path.absolute().with_name(f"{clip}.flac"))))
                texts.append(text[0] if text else "")
                speakers.append(path.parts[-3])
        return Rows(f"{self.folder} [{name}]", ids, wavs, texts, speakers, malformed=malformed)


class VoxCeleb(Source):
    """VoxCeleb 1, 2 or both as unpacked: ``.../id10270/5r0dWxy17C8/00001.wav``, a folder per speaker with a folder per
    video; the id is these three parts without the suffix, as in lists of trials.

    - Test has the speakers below a folder ``test``, and VoxCeleb1's 40 test speakers in any folder.
    - Dev has the 2 % of the other speakers with the smallest hashes, and train the rest.
    """

    kind = "VoxCeleb"
    recorded = True
    no_texts = "is VoxCeleb, which has no transcripts", _WITHOUT
    #: Folders down to the speakers', such as VoxCeleb1/dev/wav/id10001.
    _DEPTH = 4
    #: The speakers of VoxCeleb1's test set, whose names begin with an E.
    _TEST = range(10270, 10310)
    #: The share of the other speakers in dev, and their minimum number.
    _SHARE = 0.02
    _MIN_SPEAKERS = 2

    def __init__(self, folder: Path):
        self.folder = folder
        self.where = str(folder)

    @classmethod
    def matches(cls, folder: Path) -> bool:
        """Whether a folder has folders of speakers with recordings in those of videos."""
        return any(next(_recordings(speaker, "*/*"), None) for speaker in cls._speakers(folder))

    @classmethod
    def _speakers(cls, folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
        """Find the speakers' folders below a folder."""
        for path in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
            if re.fullmatch(r"id\d{5}", path.name):
                yield path
            elif depth > 1:
                yield from cls._speakers(path, depth - 1)

    def names(self) -> list[str]:
        return list(SPLITS)

    def fingerprint(self) -> list[Any]:
        speakers = self._speakers(self.folder)
        return [self.kind, *(stamp(video) for speaker in speakers for video in sorted(speaker.iterdir()))]

    def read(self, name: str, show_progress: bool = True) -> Rows:
        self.check_texts()
        paths = [path for speaker in self._split()[name] for path in sorted(_recordings(speaker, "*/*"))]
        return Rows(
            f"{self.folder} [{name}]", ["/".join(path.with_suffix("").parts[-3:]) for path in paths],
            [str(path.absolute()) for path in paths], speakers=[path.parts[-3] for path in paths])

    def _split(self) -> dict[str, list[Path]]:
        """The folders of each split's speakers."""
        folders: dict[str, list[Path]] = {split: [] for split in SPLITS}
        others: dict[str, list[Path]] = {}  # by speaker, who has several folders if both corpora are there
        for path in self._speakers(self.folder):
            if "test" in path.relative_to(self.folder).parts or int(path.name[2:]) in self._TEST:
                folders["test"].append(path)
            else:
                others.setdefault(path.name, []).append(path)
        by_hash = sorted(others, key=lambda name: hashlib.sha256(name.encode()).digest())
        dev_count = max(self._MIN_SPEAKERS, round(self._SHARE * len(by_hash)))
        for speaker in by_hash[:dev_count]:
            folders["dev"] += others[speaker]
        for speaker in by_hash[dev_count:]:
            folders["train"] += others[speaker]
        return {split: sorted(paths) for split, paths in folders.items()}


class VoiceBank(Source):
    """VoiceBank-DEMAND and corpora with its layout: noisy recordings and clean ones of the same name, in
    ``noisy_trainset_28spk_wav``, ``clean_trainset_28spk_wav``, ``noisy_testset_wav`` and ``clean_testset_wav``.

    - A file name begins with its speaker, ``p226_001.wav``. Two speakers of the training set are dev.
    - The training set may be another one, such as that of 56 speakers: it has every ``noisy_trainset_*_wav``.
    - There are no texts.
    """

    kind = "VoiceBank-DEMAND"
    recorded = True
    no_texts = "has recordings but no transcripts", _WITHOUT
    #: The column of the clean recordings.
    _CLEAN = "clean_wav"
    #: Speakers of the training set that are used as dev, as in SpeechBrain's recipe.
    _DEV_SPEAKERS = ("p226", "p287")

    def __init__(self, folder: Path, columns: Mapping[str, str]):
        self.folder = folder
        self.where = str(folder)
        self.columns = columns

    @classmethod
    def matches(cls, folder: Path) -> bool:
        """Whether a folder has such folders."""
        return bool(cls(folder, {}).names())

    def names(self) -> list[str]:
        names = []
        if self._sets("train"):
            names += ["train", "dev"]
        if self._sets("test"):
            names.append("test")
        return names

    def fingerprint(self) -> list[Any]:
        folders = sorted({path.parent for name in ("train", "test") for path in self._paths(name)})
        return [self.kind, *(stamp(folder) for noisy in folders for folder in (noisy, self._clean(noisy)))]

    def header(self, name: str) -> list[str]:
        return ["id", "audio", "speaker", self._CLEAN]

    def read(self, name: str, show_progress: bool = True) -> Rows:
        self.check_texts()
        speaker_of = {path: path.name.partition("_")[0] for path in self._paths(name)}
        paths = [path for path, speaker in speaker_of.items()
                 if name == "test" or (speaker in self._DEV_SPEAKERS) == (name == "dev")]
        clean = [str(self._clean(path.parent) / path.name) for path in paths]
        roles = {role: find_column(role, self.header(name), self.columns) for role in self.wanted}
        for role, column in roles.items():
            if column is None:
                raise no_column(self.where, role, self.header(name), self.columns)
        return Rows(f"{self.folder} [{name}]", [path.stem for path in paths], list(map(str, paths)),
                    speakers=[speaker_of[path] for path in paths],
                    meta={role: clean for role, column in roles.items() if column == self._CLEAN})

    def _sets(self, name: str) -> list[Path]:
        pattern = "noisy_testset_wav" if name == "test" else "noisy_trainset*_wav"
        return sorted(path for path in self.folder.glob(pattern) if path.is_dir())

    def _paths(self, name: str) -> list[Path]:
        return sorted(path.absolute() for folder in self._sets(name) for path in _recordings(folder, "*"))

    @staticmethod
    def _clean(noisy: Path) -> Path:
        return noisy.with_name(f"clean_{noisy.name.removeprefix('noisy_')}")
