"""Audio embedded in a dataset: its bytes are written once to tar shards, which a manifest can refer to."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.data import tar
from sbkit.data.audio import AudioError, audio_info
from sbkit.data.lock import locked
from sbkit.data.manifest import Column, to_number
from sbkit.data.sources.base import Rows, unique_ids
from sbkit.system import disk
from sbkit.system.console import atomic_write, progress, stored_json

_SHARD_BYTES = 1 << 30
SHARD_ROWS = 50_000

#: Yields the rows of a dataset from a row number on, in tables with the columns id, path, bytes, text, speaker,
#: duration, start, "meta <name>" and "audio <name>"; all are texts except ``bytes`` (binary) and the last, further
#: recordings with ``bytes`` and ``path``.
Tables = Callable[[int], Iterator[pa.Table]]


def store_rows(tables: Tables, folder: Path, name: str, origin: str, *, total: int | None = None,
               show_progress: bool = True) -> Rows:
    """Write the audio of a split to ``<folder>/<name>-NNNNNN.tar`` and return rows that refer to it.

    Each shard has a table of its rows beside it. Both are complete or absent, so a call after an interruption continues
    after the last shard, and a finished split is read from its tables alone. Rows without bytes keep their path.
    """
    with locked(folder / f".{name}.lock"), disk.disk_errors_as_user_error(folder):
        if not is_stored(folder, name):
            with progress(what=f"storing {name}", total=total, unit="row", show=show_progress) as bar:
                rows, shards = _write_shards(tables, folder, name, bar)
            paths = [_shard_path(folder, name, number) for number in range(shards)]
            tars = [path.name for path in paths if path.exists()]
            with atomic_write(folder / f"{name}.json") as file:
                json.dump({"rows": rows, "shards": shards, "tars": tars}, file)
    stored = _read_tables(folder, name)
    if not stored:
        return Rows(origin, [], [])
    whole = pa.concat_tables(stored, promote_options="default")

    def column(name: str) -> Column:
        return Column(whole.column(name).cast(pa.large_string()).fill_null(""))

    # Rows without ids get the names of their files, which may not be unique.
    ids = column("id") if whole.column("id").null_count < len(whole) else Column(unique_ids(column("name")))
    return Rows(
        origin=origin, ids=ids, wavs=column("wav"), texts=column("text"), speakers=column("speaker"),
        durations=whole.column("duration").to_numpy(), starts=whole.column("start").to_numpy(),
        meta={name[5:]: column(name) for name in whole.column_names if name.startswith("meta ")})


def _write_shards(tables: Tables, folder: Path, name: str,
                  bar: Any) -> tuple[int, int]:  # a bar of tqdm, which has no types
    """Write the shards of a split that aren't there yet; return how many rows and shards it has."""
    finished = _read_tables(folder, name)
    shards = len(finished)
    rows = sum(map(len, finished))
    bar.update(rows)
    remaining = _read(tables(rows), folder)
    table = next(remaining, None)
    while table is not None:
        with ShardWriter(folder, name, shards) as shard:
            while table is not None:
                for row in table.to_pylist():
                    shard.add(row, rows)
                    rows += 1
                bar.update(len(table))
                if shard.full:
                    break
                table = next(remaining, None)
        if shard.rows:
            shards += 1
        if table is not None:
            table = next(remaining, None)
    return rows, shards


def _read(tables: Iterator[pa.Table], folder: Path) -> Iterator[pa.Table]:
    with disk.disk_errors_as_user_error(folder):  # here, so that the shard that is being written isn't blamed
        yield from tables


def is_stored(folder: Path, name: str) -> bool:
    """Whether a split is stored completely and its shards still exist."""
    stored = stored_json(folder / f"{name}.json")
    return "tars" in stored and all((folder / file).is_file() for file in stored["tars"])


def _shard_path(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}-{number:06d}.tar"


class ShardWriter(contextlib.AbstractContextManager["ShardWriter"]):
    """Writes a shard and the table of its rows, which get their names when this context ends without an error."""

    def __init__(self, folder: Path, name: str, number: int):
        self.path = _shard_path(folder, name, number)
        self.rows: list[dict[str, Any]] = []
        self._file: IO[bytes] | None = None
        self._written = contextlib.ExitStack()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        with self._written:
            if error is not None:
                raise error  # within, so that what was written is removed
            if self._file is not None:
                self._file.write(tar.END)
        if self.rows:
            with atomic_write(self.path.with_suffix(".parquet"), "wb") as file:
                pq.write_table(pa.Table.from_pylist(self.rows), file)

    def add(self, row: dict[str, Any], number: int) -> None:
        data = row.pop("bytes")
        path = row.pop("path") or ""
        listed = to_number(row["duration"] or "")
        is_segment = bool(row["start"])
        row["wav"] = path
        row["duration"] = listed
        row["start"] = to_number(row["start"]) if is_segment else 0.0
        if data:
            row["wav"] = self._append(data, path, number)
            try:
                available = audio_info(data, whole=True)[0] - row["start"]
            except AudioError:  # preparation reports it
                available = float("nan")
            # For a segment, the duration says where it ends; otherwise the audio is more reliable than a list.
            row["duration"] = listed if listed < available and is_segment else available
        row["name"] = PurePosixPath(path).stem or f"{number:08d}"
        for key in [key for key in row if key.startswith("audio ")]:
            further = row.pop(key) or {}
            name = key.removeprefix("audio ")
            further_data = further.get("bytes")
            wav = further.get("path") or ""
            if further_data:
                wav = self._append(further_data, wav, number, f".{name}")
            row[f"meta {name}"] = wav
        self.rows.append(row)

    def _append(self, data: bytes, path: str, number: int, name: str = "") -> str:
        if self._file is None:
            self._file = self._written.enter_context(atomic_write(self.path, "wb"))
        offset = self._file.tell() + tar.BLOCK
        tar.append(self._file, f"{number:08d}{name}.{tar.suffix(data, path)}", data)
        return f"{os.path.abspath(self.path)}?offset={offset}&size={len(data)}"

    @property
    def full(self) -> bool:
        return len(self.rows) >= SHARD_ROWS or (self._file is not None and self._file.tell() >= _SHARD_BYTES)


def _read_tables(folder: Path, name: str) -> list[pa.Table]:
    """The tables of finished shards, up to the first one that is missing."""
    tables: list[pa.Table] = []
    while (shard := _shard_path(folder, name, len(tables))).with_suffix(".parquet").exists():
        table = pq.read_table(shard.with_suffix(".parquet"))
        inside = pc.match_substring(table.column("wav"), f"{shard.name}?offset=")
        if not shard.exists() and pc.any(inside).as_py():
            break  # the shard was deleted
        tables.append(table)
    return tables
