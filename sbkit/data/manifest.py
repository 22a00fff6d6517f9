"""The manifest, one row per utterance: on disk a CSV that SpeechBrain can read, in memory Arrow columns.

Beside a large prepared CSV is an Arrow file with the same content. All ranks and data workers of a machine map it, so
it opens immediately, and its pages are in memory only once.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.data.delimited import read_delimited
from sbkit.data.remote import NO_REMOTE, Remote
from sbkit.errors import SbkitError, shown, shown_names
from sbkit.system.console import atomic_write

REQUIRED = ("ID", "duration", "wav", "wrd")
#: Names that metadata columns can't have.
RESERVED = (*REQUIRED, "spk_id", "start")
_PREPARED = ("ID", "duration", "wav", "wrd", "spk_id")
#: Suffix of the column that has the durations of a column of recordings.
SECONDS = "_seconds"
#: A prepared manifest with at least this many rows is mapped.
MAPPED_ROWS = 500_000
_ROWS_PER_BLOCK = 200_000
_DATA_ROOT = r"^(\$data_(root|folder)|\$?\{data_(root|folder)\})"


class Column(Sequence[str]):
    """A read-only sequence of strings in one Arrow array.

    Two million strings are three blocks of memory instead of two million Python objects, so that worker processes
    share them with their parent. ``column[i]`` is a ``str``; ``.arrow`` is the array, for operations on all rows.
    """

    __slots__ = ("arrow",)

    def __init__(self, values: Sequence[str] | pa.Array | pa.ChunkedArray):
        if isinstance(values, Column):
            values = values.arrow
        if isinstance(values, pa.ChunkedArray):
            # Not `combine_chunks()`: it gives an Array only where there is at least one chunk.
            chunks = values.chunks or [pa.array([], values.type)]
            values = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)  # which copies a single one
        if not isinstance(values, pa.Array):
            values = pa.array(values, pa.large_string())
        self.arrow: pa.Array = values.cast(pa.large_string())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Column: ...
    def __getitem__(self, index: int | slice) -> str | Column:
        if isinstance(index, slice):
            return Column(self.arrow[index])
        return self.arrow[int(index)].as_py()

    def __len__(self) -> int:
        return len(self.arrow)

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self.arrow), 65536):
            yield from self.arrow[start : start + 65536].to_pylist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Column):
            return self.arrow.equals(other.arrow)
        return isinstance(other, Sequence) and list(self) == list(other)

    def take(self, indices: np.ndarray) -> Column:
        return Column(self.arrow.take(pa.array(indices)))

    def is_in(self, values: Sequence[str]) -> np.ndarray:
        """Which strings are among these, [N] booleans."""
        return pc.is_in(self.arrow, Column(values).arrow).to_numpy(zero_copy_only=False)

    def numbered(self) -> tuple[Column, np.ndarray]:
        """The different strings, and the index among them of each string, [N]."""
        encoded = self.arrow.dictionary_encode()
        return Column(encoded.dictionary), encoded.indices.to_numpy(zero_copy_only=False)

    def lines(self) -> Iterator[memoryview]:
        """Yield the UTF-8 of all non-empty strings, each with a line end, in blocks."""
        for start in range(0, len(self.arrow), _ROWS_PER_BLOCK):
            block = self.arrow[start : start + _ROWS_PER_BLOCK]
            yield _content(join(block.filter(pc.not_equal(block, "")), "\n"))

    def __repr__(self) -> str:
        return f"Column({len(self)} strings)"


@dataclass
class Utterance:
    """One row of a manifest: ``duration`` seconds of ``wav`` from ``start`` on, and their transcript."""

    id: str
    wav: str
    start: float
    duration: float
    text: str = ""
    speaker: str = ""
    meta: dict[str, str] = field(default_factory=dict)


class Manifest:
    """Utterances in columns, each of length N.

    On disk a CSV, ``ID,duration,wav,spk_id,wrd`` first, then ``start`` where an utterance is a segment of
    its file, then any metadata columns. ``wav`` is a path, or a member of an uncompressed tar written
    as ``shard.tar?offset=BYTES&size=BYTES``.

    ids, wavs, texts : N strings
    durations : N seconds
    speakers : N strings, by default empty
    starts : N seconds into the file, by default 0
    meta : further columns by name, N strings each
    remote : which URLs among ``wavs`` may be opened
    mapped : whether the columns are mapped from a prepared file
    has_urls : whether any of ``wavs`` is a URL, if known
    shares : for a mixture's training set, the share of the audio for each value of its column ``corpus``
    once : for a mixture's training set, the part that a pass goes through once; None: a pass has as much audio as all
    """

    def __init__(self, *, ids: Sequence[str], durations: Sequence[float] | np.ndarray, wavs: Sequence[str],
                 texts: Sequence[str], speakers: Sequence[str] | None = None,
                 starts: Sequence[float] | np.ndarray | None = None,
                 meta: Mapping[str, Sequence[str]] | None = None, remote: Remote = NO_REMOTE, mapped: bool = False,
                 has_urls: bool | None = None, shares: Mapping[str, float] | None = None, once: str | None = None):
        self.remote = remote
        self.mapped = mapped
        self._has_urls = has_urls
        self.shares = dict(shares or {})
        self.once = once
        self.ids = Column(ids)
        n = len(self.ids)
        self.durations = np.ascontiguousarray(durations, dtype=np.float32)
        # float64: after ten hours of audio a float32 is off by 2 ms.
        self.starts = np.zeros(n) if starts is None else np.ascontiguousarray(starts, dtype=np.float64)
        self.wavs = Column(wavs)
        self.texts = Column(texts)
        self.speakers = Column(pa.repeat("", n)) if speakers is None else Column(speakers)
        self.meta = {name: Column(column) for name, column in (meta or {}).items()}
        columns: list[tuple[str, Sized]] = [
            ("durations", self.durations), ("starts", self.starts), ("wavs", self.wavs), ("texts", self.texts),
            ("speakers", self.speakers), *self.meta.items()]
        for name, column in columns:
            if len(column) != n:
                raise ValueError(f"{name} has {len(column)} entries for {n} ids")
        if taken := [name for name in self.meta if name in RESERVED]:
            raise ValueError(f"metadata cannot be called {taken[0]!r}: the manifest has a column of that name")

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Manifest({len(self)} utterances, {self.hours:.2f} h)"

    @property
    def hours(self) -> float:
        return float(self.durations.sum(dtype=np.float64)) / 3600

    @property
    def has_urls(self) -> bool:
        """Whether any recording is a URL."""
        if self._has_urls is None:
            self._has_urls = bool(pc.any(pc.match_substring(self.wavs.arrow, "://")).as_py())
        return self._has_urls

    def row(self, i: int) -> Utterance:
        return Utterance(
            id=self.ids[i], wav=self.wavs[i], start=float(self.starts[i]), duration=float(self.durations[i]),
            text=self.texts[i], speaker=self.speakers[i],
            meta={name: column[i] for name, column in self.meta.items()},
        )

    def column(self, name: str) -> Column:
        """The texts [N] of ``speaker``, ``text`` or ``id``, or of a metadata column."""
        columns = {"speaker": self.speakers, "text": self.texts, "id": self.ids, **self.meta}
        if name not in columns:
            raise SbkitError("missing-column", f"the manifest has no column {name!r} (its columns: "
                             f"{shown_names(columns)})",
                             hint="check its name in clips_per or the task's columns, then prepare the corpus again",
                             key=name)
        return columns[name]

    def seconds(self, name: str) -> np.ndarray:
        """Seconds [N] of the recordings in a metadata column, as measured by preparation."""
        column = self.column(f"{name}{SECONDS}").arrow
        return to_seconds(Path("the manifest"), f"{name}{SECONDS}", pa.chunked_array([column]))

    def digest(self) -> str:
        """Hash ids, texts, speakers and durations; the same for a corpus that was moved."""
        digest = hashlib.sha256(self.durations.tobytes())
        for column in (self.ids, self.texts, self.speakers):
            for value in column:
                digest.update(value.encode() + b"\0")
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Utterance]:
        return (self.row(i) for i in range(len(self)))

    def select(self, indices: Sequence[int] | np.ndarray) -> Manifest:
        """The rows at ``indices`` (numbers, or N booleans), in that order."""
        indices = np.asarray(indices)
        if indices.dtype == bool:
            indices = np.flatnonzero(indices)
        indices = indices.astype(np.int64)
        return self.replace(
            ids=self.ids.take(indices), durations=self.durations[indices], wavs=self.wavs.take(indices),
            texts=self.texts.take(indices), speakers=self.speakers.take(indices), starts=self.starts[indices],
            meta={name: column.take(indices) for name, column in self.meta.items()})

    def replace(self, **columns: Any) -> Manifest:
        """A manifest with some columns replaced, such as ``replace(wavs=...)`` after the audio was copied."""
        unchanged = {name: getattr(self, name)
                     for name in ("ids", "durations", "wavs", "texts", "speakers", "starts", "meta", "remote", "shares",
                                  "once")}
        return Manifest(**{**unchanged, **columns})

    def joined(self, other: Manifest) -> Manifest:
        """These rows, then those of another manifest with the same metadata columns."""
        return self.replace(
            **{name: pa.concat_arrays([getattr(self, name).arrow, getattr(other, name).arrow])
               for name in ("ids", "wavs", "texts", "speakers")},
            durations=np.concatenate([self.durations, other.durations]),
            starts=np.concatenate([self.starts, other.starts]),
            meta={name: pa.concat_arrays([column.arrow, other.meta[name].arrow]) for name, column in self.meta.items()})

    # ------------------------------------------------------------------ files

    @classmethod
    def read(cls, path: str | Path, data_root: str | Path | None = None, remote: Remote = NO_REMOTE) -> Manifest:
        """Read a CSV.

        ``$data_root`` at the start of ``wav`` becomes ``data_root``, by default the CSV's folder.
        A ``$`` anywhere else, in a transcript for example, is just a character.
        """
        path = Path(path)
        csv = read_delimited(path)
        hint = "a manifest is a CSV with the columns ID,duration,wav,spk_id,wrd"
        ids, durations, wavs, texts = (csv.need(name, hint=hint) for name in REQUIRED)
        if csv.malformed:
            line, what = csv.malformed[0]
            raise SbkitError("malformed-row", f"{path}, line {line}: {what}",
                             hint="quote a field that contains a comma", file=path, line=line)
        start = csv.find("start")
        return cls(
            ids=ids, durations=to_seconds(path, "duration", durations),
            wavs=replace_data_root(wavs, path.parent if data_root is None else data_root),
            texts=texts, speakers=csv.find("spk_id"),
            starts=None if start is None else to_seconds(path, "start", pc.if_else(
                pc.equal(start, ""), pa.scalar("0", pa.large_string()), start)),
            meta={name: column for name, column in csv.columns.items() if name not in RESERVED}, remote=remote,
        )

    def write(self, path: str | Path, data_root: str | Path | None = None) -> None:
        """Write a CSV, completely or not at all; in paths below ``data_root``, that becomes ``$data_root``."""
        wavs = self.wavs.arrow
        if data_root is not None:
            root = str(data_root).rstrip("/") + "/"
            below = join("$data_root/", pc.utf8_slice_codeunits(wavs, len(root)))
            wavs = pc.if_else(pc.starts_with(wavs, root), below, wavs)
        columns = self._columns() | {"wav": wavs}
        with atomic_write(path, "wb") as file:
            header = [quote(pa.array([name], pa.large_string()))[0].as_py() for name in columns]
            file.write((",".join(header) + "\n").encode())
            for start in range(0, len(self), _ROWS_PER_BLOCK):
                fields = [quote(column[start : start + _ROWS_PER_BLOCK]) for column in columns.values()]
                file.write(_content(join(join(*fields, separator=","), "\n")))

    def _columns(self) -> dict[str, pa.Array]:
        """The columns of a file, by name."""
        columns = {"ID": self.ids.arrow, "duration": pa.array(self.durations), "wav": self.wavs.arrow,
                   "spk_id": self.speakers.arrow, "wrd": self.texts.arrow}
        if self.starts.any():
            columns["start"] = pa.array(self.starts)
        return columns | {name: column.arrow for name, column in self.meta.items()}

    @classmethod
    def open_prepared(cls, path: str | Path, remote: Remote = NO_REMOTE) -> Manifest:
        """Map the Arrow file by :meth:`write_prepared`, or read the CSV if there is none or it is outdated."""
        path = Path(path)
        try:
            file = pa.ipc.open_file(pa.memory_map(str(mapped_file(path))))
            facts = file.schema.metadata or {}
            if facts.get(b"csv") != _version(path) or file.num_record_batches != 1:
                return cls.read(path, remote=remote)
            columns = dict(zip(file.schema.names, file.get_batch(0).columns, strict=True))
            ids, durations, wavs, texts, speakers = (columns.pop(name) for name in _PREPARED)
        except (OSError, KeyError, pa.ArrowInvalid):
            return cls.read(path, remote=remote)
        starts = columns.pop("start", None)
        return cls(ids=ids, durations=np.from_dlpack(durations), wavs=wavs, texts=texts, speakers=speakers,
                   starts=None if starts is None else np.from_dlpack(starts), meta=columns, remote=remote, mapped=True,
                   has_urls=facts[b"urls"] == b"yes")

    def write_prepared(self, path: str | Path) -> None:
        """Write a CSV, and for many rows also an Arrow file, which :meth:`open_prepared` maps."""
        path = Path(path)
        self.write(path)
        if len(self) < MAPPED_ROWS or pc.any(pc.match_substring_regex(self.wavs.arrow, _DATA_ROOT)).as_py():
            mapped_file(path).unlink(missing_ok=True)
            return
        columns = self._columns()
        # One batch, so that each column is one piece of memory.
        batch = pa.record_batch(list(columns.values()), names=list(columns)).replace_schema_metadata(
            {"csv": _version(path), "urls": "yes" if self.has_urls else "no"})
        with atomic_write(mapped_file(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as out:
            out.write_batch(batch)


def mapped_file(path: Path) -> Path:
    """The path of the Arrow file beside a prepared CSV."""
    return path.with_suffix(".arrow")


def _version(path: Path) -> bytes:
    """Return a text that changes when the file is written."""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}".encode()


def _content(column: pa.Array) -> memoryview:
    """The concatenated bytes of all texts of a large_string array."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int64)
    return memoryview(data or b"")[bounds[column.offset] : bounds[column.offset + len(column)]]


MAX_SECONDS = 1e9  # 30 years; sums of larger numbers overflow


def to_seconds(path: Path, name: str, column: pa.ChunkedArray, unknown: float | None = None) -> np.ndarray:
    """Convert a column of texts to float64 seconds [N].

    An entry that isn't a number from 0 to ``MAX_SECONDS`` becomes ``unknown``; if that is None, it is an error that
    names the row.
    """
    column = pc.utf8_trim_whitespace(column)
    try:
        chunks = pc.cast(column, pa.float64()).chunks  # Arrow's ``to_numpy`` would import pandas (40 MB)
        seconds = np.concatenate([np.from_dlpack(chunk) for chunk in chunks] or [np.zeros(0)])
    except pa.ArrowInvalid:
        seconds = np.array([to_number(text) for text in Column(column)])
    bad = ~((seconds >= 0) & (seconds <= MAX_SECONDS))
    if unknown is not None:
        return np.where(bad, unknown, seconds)
    if bad.any():
        row = int(bad.argmax())
        raise SbkitError("malformed-row", f"{path}, row {row + 1}: {name} is {shown(column[row].as_py())}",
                         hint="expected a number of seconds", file=path, key=name, value=column[row].as_py())
    return seconds


def to_number(text: str) -> float:
    """Convert a text to a number; NaN if it isn't one."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def replace_data_root(wavs: pa.ChunkedArray, root: str | Path) -> pa.ChunkedArray:
    """Replace ``$data_root`` at the start of each path by ``root``.

    ``${data_root}``, ``{data_root}`` and ``data_folder``, as SpeechBrain's recipes call it, too.
    """
    safe = re.sub(r"\\", r"\\\\", str(root))  # RE2 reads a backslash in a replacement as a group number
    return pc.replace_substring_regex(wavs, _DATA_ROOT, safe)


def join(*parts: pa.Array | str, separator: str = "") -> pa.Array:
    """Join columns (and constant strings) row by row."""
    large = [pa.scalar(part, pa.large_string()) if isinstance(part, str) else part
             for part in (*parts, separator)]
    return pc.binary_join_element_wise(*large)


def quote(column: pa.Array) -> pa.Array:
    """Return a column as CSV fields, quoted only if they contain a comma, quote or line end, or begin or end blank."""
    if not pa.types.is_large_string(column.type):
        return pc.cast(column, pa.large_string())
    needs = pc.match_substring_regex(column, r'[",\r\n]|^\s|\s$')
    if not pc.any(needs).as_py():
        return column
    return pc.if_else(needs, join('"', pc.replace_substring(column, '"', '""'), '"'), column)
