"""``left_out.csv``: every row that preparation left out and why; the recordings in it are looked at again later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from sbkit.data.delimited import read_delimited
from sbkit.data.manifest import Column
from sbkit.data.presence import existing, file_version
from sbkit.system.console import atomic_write

NAME = "left_out.csv"
_COLUMNS = ("split", "ID", "wav", "reason", "detail", "size", "modified")


def rows(split: str, reason: str, ids: Sequence[str], wavs: Sequence[str], details: Sequence[str], *,
         seal: bool = False) -> pa.Table:
    """N rows left out for one reason; with ``seal`` also what their files look like now."""
    seals = [file_version(wav) for wav in wavs] if seal else [("", "")] * len(ids)
    columns = ([split] * len(ids), ids, wavs, [reason] * len(ids), details, *zip(*seals, strict=True))
    return pa.table([pa.array(column, pa.large_string()) for column in columns], names=_COLUMNS)


def write(folder: Path, tables: Iterable[pa.Table]) -> None:
    """Write ``left_out.csv``, also where it stays empty."""
    none = pa.table([pa.array([], pa.large_string())] * len(_COLUMNS), names=_COLUMNS)
    with atomic_write(folder / NAME, "wb") as file:
        pacsv.write_csv(pa.concat_tables([none, *tables]), file)


def mended(folder: Path, missing: str, damaged: str) -> str | None:
    """A recording that was ``missing`` or ``damaged`` (reasons) and has come or changed since; None of none.

    Only these are looked at, one question to the file system for each damaged one and one listing for a folder of
    missing ones: asking for all of a large corpus would take minutes on a network file system.
    """
    csv = read_delimited(folder / NAME)
    reason, wavs = csv.need("reason"), csv.need("wav")
    gone = Column(pc.filter(wavs, pc.equal(reason, missing)))
    if len(gone) and (there := existing(gone)).any():
        return gone[int(there.argmax())]
    bad = pc.equal(reason, damaged)
    seals = zip(*(Column(pc.filter(csv.need(name), bad)) for name in ("wav", "size", "modified")), strict=True)
    return next((wav for wav, *seal in seals if tuple(seal) != file_version(wav)), None)
