"""The interface of all sources: rows in columns, and the names of a source's columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.data.audio import SUFFIXES
from sbkit.data.manifest import Column
from sbkit.data.presence import existing
from sbkit.errors import SbkitError, shown_names

#: Names by which a column is recognised, the likeliest first. A corpus's ``columns`` option precedes them.
ALIASES: dict[str, tuple[str, ...]] = {
    "id": ("ID", "id", "utt_id", "utt", "uttid", "key", "segment_id"),
    "audio": ("audio", "wav", "audio_filepath", "audio_path", "wav_path", "path", "file", "filename"),
    "text": ("wrd", "text", "sentence", "transcription", "transcript", "txt", "normalized_text", "raw_text"),
    "speaker": ("spk_id", "speaker_id", "speaker", "spk", "client_id"),
    "duration": ("duration", "dur", "audio_length"),
    "start": ("start", "offset"),
}
#: Columns about the speaker that are kept in the manifest, and the names they have had in releases.
META_ALIASES: dict[str, tuple[str, ...]] = {
    "accent": ("accents", "accent"), "age": ("age",), "gender": ("gender", "sex"),
    "language": ("locale", "language", "lang"),
}
#: The check of a recipe reads lists up to this many bytes, and looks for this many of their recordings.
_SHORT_LIST_BYTES = 10_000_000
_LOOKED_FOR = 10


class Rows:
    """One split of a source: N rows in columns, before any is left out.

    origin : where they were read
    ids, wavs, texts, speakers : N strings, by default empty
    durations, starts : N seconds; NaN, by default, for an unknown duration, and for a start that isn't a number; starts
        are 0 by default
    meta : further columns by name
    malformed : rows that could not be parsed, as (a name for the row, what is wrong); they count as read and left out
    """

    def __init__(self, origin: str, ids: Sequence[str], wavs: Sequence[str], texts: Sequence[str] | None = None,
                 speakers: Sequence[str] | None = None, durations: np.ndarray | None = None,
                 starts: np.ndarray | None = None, meta: Mapping[str, Sequence[str]] | None = None,
                 malformed: Sequence[tuple[str, str]] = ()):
        count = len(ids)
        self.origin = origin
        self.ids = Column(ids)
        self.wavs = Column(wavs)
        self.texts = blank(count) if texts is None else Column(texts)
        self.speakers = blank(count) if speakers is None else Column(speakers)
        self.durations = np.full(count, np.nan) if durations is None else durations
        self.starts = np.zeros(count) if starts is None else starts
        self.meta = {name: Column(column) for name, column in (meta or {}).items()}
        self.malformed = list(malformed)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def segments(self) -> bool:
        """Whether any row is a segment of a longer recording."""
        return bool((self.starts > 0).any())

    def column(self, name: str) -> Column:
        """A column by its role."""
        columns = {"speaker": self.speakers, "text": self.texts, "id": self.ids, **self.meta}
        has_speakers = pc.any(pc.not_equal(self.speakers.arrow, "")).as_py()
        if name not in columns or (name == "speaker" and not has_speakers):
            raise no_column(self.origin, name, [other for other in columns if other != name], {})
        return columns[name]

    def take(self, indices: np.ndarray) -> Rows:
        """The rows with these indices, and all malformed ones."""
        return Rows(self.origin, self.ids.take(indices), self.wavs.take(indices), self.texts.take(indices),
                    self.speakers.take(indices), self.durations[indices], self.starts[indices],
                    {name: column.take(indices) for name, column in self.meta.items()}, self.malformed)


class MissingRecordings(SbkitError):
    """A list is there, and its recordings aren't."""


class Source(ABC):
    """A corpus in some format. Creating the object is cheap; ``read`` does the work."""

    kind: str
    where: str
    recorded = False
    """Whether a corpus of this kind is known to be recordings of people; a list may name anything."""
    needs_text = True
    """Whether it must have texts."""
    no_texts = ("", "")
    """What is said of a layout without transcripts, after its path, and the hint."""
    columns: Mapping[str, str] = {}
    """Names of columns by their roles, where they aren't the usual ones."""
    wanted: Mapping[str, bool] = {}
    """Further required roles of columns, besides those in ``ALIASES``, and whether they are recordings."""

    @property
    def needed(self) -> tuple[str, ...]:
        """The roles that columns must have."""
        texts = ("text",) if self.needs_text else ()
        return ("audio", *texts, *self.wanted)

    @property
    def folders(self) -> list[str]:
        """The folders of its lists, in which its recordings should lie, or the archive or URL that has them."""
        return [self.where]

    def header(self, name: str) -> list[str] | None:
        """The names of a split's columns; None if they are only known after reading it."""
        return None

    paths_start = "relative paths in it start from its folder, or from --corpus.data_root"
    """Where recordings are looked for, of a list."""

    def files_of(self, name: str) -> list[Path]:
        """The files that are read for a split, that with its list first; none of a source without files of its own."""
        return []

    def check_list(self, name: str) -> None:
        """Refuse a split that can't be read, as far as that is soon known.

        A short list is read, and some of its recordings are looked for. Of another, only the names of its columns are
        read, if that is possible.
        """
        files = self.files_of(name)
        try:
            size = sum(path.stat().st_size for path in files)
        except OSError as error:
            raise SbkitError("not-readable", f"{error.filename}: cannot be read ({error.strerror or error})",
                             file=error.filename) from None
        if files and size <= _SHORT_LIST_BYTES:
            wavs = self.read(name, show_progress=False).wavs
            if not len(wavs):
                return
            sample = wavs.take(np.unique(np.linspace(0, len(wavs) - 1, _LOOKED_FOR).astype(int)))
            if not existing(sample).any():
                raise MissingRecordings("missing-audio", f"{files[0]}: none of the {len(sample)} recordings that were "
                                        f"looked for exists, such as {sample[0]}", hint=self.paths_start, file=files[0],
                                        value=sample[0])
            return
        header = self.header(name)
        if header is None:
            return
        for role in self.needed:
            if (role in self.wanted or role in self.columns) and find_column(role, header, self.columns) is None:
                raise no_column(f"{self.where} [{name}]", role, header, self.columns)

    def inherit_needs(self, other: Source) -> None:
        """Require the same roles as another source, which reads this one."""
        self.needs_text = other.needs_text
        self.wanted = other.wanted

    def check_texts(self) -> None:
        """Refuse a layout that never has transcripts, if the task needs them."""
        message, hint = self.no_texts
        if self.needs_text and message:
            raise SbkitError("missing-text", f"{self.where} {message}", hint=hint, file=self.where)

    @abstractmethod
    def names(self) -> list[str]:
        """The source's own names for its splits; of a single one, dev and test are split off as the recipe asks."""

    @abstractmethod
    def read(self, name: str, show_progress: bool = True) -> Rows:
        """All rows of one split."""

    @abstractmethod
    def fingerprint(self) -> list[Any]:
        """Return plain data that changes if the rows may have changed, without reading them."""

    def intact(self) -> bool:
        """Whether unpacked audio that manifests refer to still exists."""
        return True


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Join several splits of a source into one."""
    if len(parts) == 1:
        return parts[0]

    def stack(columns: Iterable[Column]) -> Column:
        return Column(pa.chunked_array([column.arrow for column in columns]))

    names = dict.fromkeys(name for part in parts for name in part.meta)
    return Rows(
        origin=" + ".join(part.origin for part in parts),
        ids=stack(part.ids for part in parts), wavs=stack(part.wavs for part in parts),
        texts=stack(part.texts for part in parts), speakers=stack(part.speakers for part in parts),
        durations=np.concatenate([part.durations for part in parts]),
        starts=np.concatenate([part.starts for part in parts]),
        meta={name: stack(part.meta.get(name) or blank(len(part)) for part in parts) for name in names},
        malformed=[row for part in parts for row in part.malformed])


def blank(count: int) -> Column:
    """A column of N empty strings."""
    return Column(pa.repeat("", count))


def stamp(path: Path) -> list[Any]:
    """Return path, size and date of a file or folder, which change if the file or the folder's entries change."""
    try:
        status = path.stat()
    except OSError:
        return [str(path), None]
    return [str(path), status.st_size if path.is_file() else None, status.st_mtime_ns]


def find_column(role: str, available: Iterable[str], columns: Mapping[str, str]) -> str | None:
    """Return the ``available`` column with a role, None if there is none; ``columns`` maps roles to other names."""
    available = list(available)
    if role in columns:
        return columns[role] if columns[role] in available else None
    return next((name for name in names_of(role) if name in available), None)


def names_of(role: str) -> tuple[str, ...]:
    """The names by which the column with a role is recognised."""
    return ALIASES.get(role) or META_ALIASES.get(role) or (role,)


def no_column(where: object, role: str, available: Iterable[str], columns: Mapping[str, str]) -> SbkitError:
    """Return the error for a role that no column has."""
    names = [columns[role]] if role in columns else names_of(role)
    wanted = ("any of " if len(names) > 1 else "") + ", ".join(map(repr, names))
    available = list(available)
    hint = f"name it in the corpus's columns, e.g. columns: {{{role}: NAME}}"
    separators = [char for char in ";\t|" if len(available) == 1 and char in available[0]]
    if separators:
        hint = f"its fields seem to be separated by {separators[0]!r}: use commas, or tabs in a .tsv"
    elif any(name.lower().endswith(SUFFIXES) for name in available):
        hint = "its first line seems to be a row: put one with the columns' names above it, such as ID,wav,wrd"
    return SbkitError("missing-column", f"{where} has no column for the {role}: looked for {wanted} among "
                      f"{shown_names(available) or 'none'}", hint=hint, file=str(where), key=role)


def unique_ids(ids: Iterable[str]) -> list[str]:
    """Make ids unique with numbers (a, a-2, a-3), skipping those that already exist."""
    ids = list(ids)
    existing_ids = set(ids)
    last_number = dict.fromkeys(ids, 0)
    result = []
    for id_ in ids:
        number = last_number[id_] + 1
        while number > 1 and f"{id_}-{number}" in existing_ids:
            number += 1
        last_number[id_] = number
        result.append(id_ if number == 1 else f"{id_}-{number}")
    return result
