"""What every kind of corpus gives: rows in columns, and names for what it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sbkit.data.manifest import Column
from sbkit.errors import SbkitError

#: What a column may be called, the likeliest name first. A corpus's ``columns`` option goes before all.
ALIASES: dict[str, tuple[str, ...]] = {
    "id": ("ID", "id", "utt_id", "utt", "uttid", "key", "segment_id"),
    "audio": ("audio", "wav", "audio_filepath", "audio_path", "wav_path", "path", "file", "filename"),
    "text": ("wrd", "text", "sentence", "transcription", "transcript", "txt", "normalized_text", "raw_text"),
    "speaker": ("spk_id", "speaker_id", "speaker", "spk", "client_id"),
    "duration": ("duration", "dur", "audio_length"),
    "start": ("start", "offset"),
}
#: Columns about the speaker that are kept in the manifest, by the names they have had.
META_ALIASES: dict[str, tuple[str, ...]] = {
    "accent": ("accents", "accent"), "age": ("age",), "gender": ("gender", "sex"),
    "language": ("locale", "language", "lang"),
}


@dataclass
class Rows:
    """One split as its source has it: N rows in columns, nothing judged yet.

    ``durations[i]`` is NaN where the source doesn't say, ``starts[i]`` where what it says is no number.
    ``malformed`` are rows that could not be read at all, as (what to call it, what is wrong); they count as
    read and left out.
    """

    origin: str
    ids: Column
    wavs: Column
    texts: Column
    speakers: Column
    durations: np.ndarray
    starts: np.ndarray
    meta: dict[str, Column] = field(default_factory=dict)
    malformed: list[tuple[str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def segments(self) -> bool:
        """Whether rows are stretches of longer recordings."""
        return bool((self.starts > 0).any())

    def take(self, at: np.ndarray) -> Rows:
        """The rows at ``at``, and all malformed ones."""
        return replace(
            self, ids=self.ids.take(at), wavs=self.wavs.take(at), texts=self.texts.take(at),
            speakers=self.speakers.take(at), durations=self.durations[at], starts=self.starts[at],
            meta={name: column.take(at) for name, column in self.meta.items()})


class Source(ABC):
    """A corpus. Opening one is cheap; ``read`` does the work."""

    kind: str
    where: str

    @abstractmethod
    def names(self) -> list[str]:
        """The splits it has, by its own names."""

    @abstractmethod
    def read(self, name: str, show_progress: bool = True) -> Rows:
        """All rows of one split."""

    @abstractmethod
    def fingerprint(self) -> Any:
        """Plain data that changes when rows may have changed; found without reading them."""

    def intact(self) -> bool:
        """Whether audio that had to be unpacked is still where the manifests say."""
        return True


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Several splits of a source as one."""
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
        malformed=[bad for part in parts for bad in part.malformed])


def blank(n: int) -> Column:
    """N empty strings."""
    return Column(pa.repeat("", n))


def stamp(path: Path) -> list[Any]:
    """What tells one version of a file (or of a folder's list of names) from another."""
    try:
        status = path.stat()
    except OSError:
        return [str(path), None]
    return [str(path), status.st_size if path.is_file() else None, status.st_mtime_ns]


def pick(role: str, available: Iterable[str], columns: Mapping[str, str]) -> str | None:
    """Which of the ``available`` columns plays a role; ``columns`` (role -> name) decides first."""
    available = list(available)
    if role in columns:
        return columns[role] if columns[role] in available else None
    return next((name for name in ALIASES[role] if name in available), None)


def check_columns(columns: Mapping[str, str] | None) -> dict[str, str]:
    """Refuse roles that don't exist, before anything is read."""
    columns = dict(columns or {})
    for role in columns:
        if role not in ALIASES:
            raise SbkitError(f"corpus: columns names the unknown role {role!r}",
                             hint=f"roles are {', '.join(ALIASES)}")
    return columns


def no_column(where: object, role: str, available: Iterable[str], columns: Mapping[str, str]) -> SbkitError:
    """The error for a role that no column plays."""
    wanted = repr(columns[role]) if role in columns else "any of " + ", ".join(map(repr, ALIASES[role]))
    return SbkitError(
        f"{where} has no column for the {role}: looked for {wanted} among {', '.join(available) or 'none'}",
        hint=f"name it in the corpus's columns, e.g. columns: {{{role}: NAME}}")


def unique_ids(ids: Iterable[str]) -> list[str]:
    """Number repeated ids (a, a-2, a-3), past numbers that are ids themselves."""
    ids = list(ids)
    known, seen = set(ids), dict.fromkeys(ids, 0)
    result = []
    for id_ in ids:
        seen[id_] += 1
        if seen[id_] > 1:
            while f"{id_}-{seen[id_]}" in known:
                seen[id_] += 1
        result.append(id_ if seen[id_] == 1 else f"{id_}-{seen[id_]}")
    return result
