"""LJSpeech and corpora with its layout: ``metadata.csv`` without a header, and recordings in ``wavs/``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbkit.data.audio import SUFFIXES
from sbkit.data.sources.base import ALIASES, Rows, Source, stamp
from sbkit.data.sources.files import lines
from sbkit.data.splits import SPLITS, assign_splits
from sbkit.errors import SbkitError

METADATA = "metadata.csv"
WAVS = "wavs"
_LEAST = 8  # ids in dev and in test
_ROLES = ("id", "audio", "text", "speaker")
_MAX_COLUMNS = 3  # fields with a known meaning
_NAMED = "name fields by their numbers, e.g. --corpus.columns '{text: 2, speaker: 3}'"


class LJSpeech(Source):
    """One speaker's sentences: ``metadata.csv`` with fields between ``|``, no header and no quotation, and ``wavs/``.

    - The first field is an id, whose recording is ``wavs/ID.wav``, or the recording itself; the second is its text. The
      third is the same text with numbers and abbreviations written out, and is used if it isn't empty. A corpus's
      ``columns`` choose other fields by number.
    - There are no splits: dev has the 2 % of the ids with the smallest hashes, test those with the largest, so they
      don't change when ids are added; at least 8 ids, if there are 80.
    - There are no speakers, unless a column names them, so all of it is one voice.
    """

    kind = "LJSpeech"

    def __init__(self, folder: Path, columns: Mapping[str, str], data_root: str | Path | None = None):
        self.folder = folder
        self.path = folder / METADATA
        self.where = str(folder)
        self.places: dict[str, int] = {}  # the index of each field
        for role, number in columns.items():
            if role in ALIASES and role not in _ROLES:
                raise SbkitError("bad-value", f"corpus: columns names the {role}, which {self.path} has no field for",
                                 hint=f"roles are {', '.join(_ROLES)}", key=f"corpus.columns.{role}", file=self.path)
            if not str(number).isdecimal() or int(str(number)) < 1:
                raise SbkitError("bad-value", f"corpus: columns: {role} is {number!r}, but {self.path} has no header",
                                 hint=_NAMED, key=f"corpus.columns.{role}", value=number, file=self.path)
            self.places[role] = int(str(number)) - 1
        self.root = os.path.abspath(folder) if data_root is None else str(data_root).rstrip("/")

    @staticmethod
    def matches(folder: Path) -> bool:
        """Whether a folder has such a list, and no ``train.csv``."""
        path = folder / METADATA
        if not path.is_file() or (folder / "train.csv").exists():
            return False
        return b"|" in next((line for _, line in lines(path)), b"")

    def names(self) -> list[str]:
        return list(SPLITS)

    def fingerprint(self) -> list[Any]:
        return [self.kind, stamp(self.path), self.root]

    def read(self, name: str, show_progress: bool = True) -> Rows:
        rows, malformed = self._rows()
        self._check(rows)
        id_place = self._place_of("id")
        split_of = assign_splits((row[id_place] for row in rows), _LEAST)
        rows = [row for row in rows if split_of[row[id_place]] == name]
        speaker_place = self.places.get("speaker")
        further = [role for role in self.wanted if role not in ALIASES and role in self.places]
        return Rows(
            str(self.path), [self._id(row) for row in rows], [self._wav(row) for row in rows],
            [self._text(row) for row in rows],
            None if speaker_place is None else [row[speaker_place] for row in rows],
            meta={role: [row[self.places[role]] for row in rows] for role in further},
            malformed=malformed if name == "train" else [])

    def _id(self, row: list[str]) -> str:
        id_ = row[self._place_of("id")].removeprefix(f"{WAVS}/")
        return id_[:id_.rindex(".")] if id_.lower().endswith(SUFFIXES) else id_

    def _wav(self, row: list[str]) -> str:
        """The path of a row's recording, which its field names by an id, or by a path from the folder or ``wavs/``."""
        wav = row[self._place_of("audio")]
        if "://" in wav or os.path.isabs(wav):
            return wav
        if not wav.lower().endswith(SUFFIXES):
            wav += ".wav"
        if not wav.startswith(f"{WAVS}/"):
            wav = f"{WAVS}/{wav}"
        return f"{self.root}/{wav}"

    def _place_of(self, role: str) -> int:
        return self.places.get(role, 1 if role == "text" else 0)

    def _rows(self) -> tuple[list[list[str]], list[tuple[str, str]]]:
        """Return the fields of rows with the most common number of fields, and what is wrong with the others."""
        numbered_rows: list[tuple[int, list[str]]] = []
        malformed: list[tuple[str, str]] = []
        for number, line in lines(self.path):
            try:
                numbered_rows.append((number, [field.strip() for field in line.decode("utf-8").split("|")]))
            except UnicodeDecodeError:
                malformed.append((f"{self.path.name} line {number}", "not UTF-8"))
        if not numbered_rows:
            return [], malformed

        most_common_width = Counter(len(row) for _, row in numbered_rows).most_common(1)[0][0]
        width = max(2, most_common_width)
        rows = []
        for number, row in numbered_rows:
            if len(row) != width:
                fields = "field" if len(row) == 1 else "fields"
                malformed.append((f"{self.path.name} line {number}", f"{len(row)} {fields} instead of {width}"))
            elif not row[0]:
                malformed.append((f"{self.path.name} line {number}", "no id"))
            else:
                rows.append(row)
        return rows, malformed

    def _check(self, rows: list[list[str]]) -> None:
        """Refuse fields that don't exist or whose meaning is unknown."""
        width = len(rows[0]) if rows else 0
        for role, place in self.places.items():
            if rows and place >= width:
                raise SbkitError("bad-value", f"corpus: columns: {role} is {place + 1}, but {self.path} has {width} "
                                 "fields", key=f"corpus.columns.{role}", value=place + 1, file=self.path)
        if "text" in self.places or width < _MAX_COLUMNS:
            return
        if width > _MAX_COLUMNS:
            raise SbkitError("ambiguous-columns", f"{self.path} has {width} fields, and LJSpeech {_MAX_COLUMNS}",
                             hint=_NAMED, file=self.path)
        texts = {row[1] for row in rows} - {""}
        thirds = {row[2] for row in rows} - {""}
        if 2 * len(thirds) < len(texts) and len(thirds) > 0:
            raise SbkitError("ambiguous-columns", f"{self.path}: the third field has {len(thirds)} different values "
                             f"for {len(texts)} texts, such as {min(thirds)[:40]!r}: is it the speaker and not a text?",
                             hint=_NAMED, file=self.path)

    def _text(self, row: list[str]) -> str:
        normalised = row[2] if "text" not in self.places and len(row) >= _MAX_COLUMNS else ""
        return normalised or row[self._place_of("text")]
