"""``left_out.csv``: the rows that preparation left out and why, and whether any of their recordings has changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from sbkit.data.delimited import header, read_delimited
from sbkit.data.manifest import Column
from sbkit.data.presence import existing, file_version
from sbkit.system.console import atomic_write

NAME = "left_out.csv"
#: Reasons for which preparation leaves out a row; the first two may no longer hold later, because the recording
#: appears or changes.
MISSING = "missing clip"
UNDECODABLE = "undecodable"
MALFORMED = "malformed row"
REFUSED = "refused URL"
IN_OTHER_SPLIT = "also in dev or test"
EXCLUDED = "excluded"
#: The code of each reason, in the order in which preparation looks at them: only the first that applies to a row
#: counts. An undecodable row has the code of what is wrong with its recording instead.
CODES = {
    MALFORMED: "malformed-row",
    REFUSED: "url-not-allowed",
    "repeated id": "repeated-id",
    IN_OTHER_SPLIT: "in-other-split",
    MISSING: "missing-audio",
    "no text": "missing-text",
    EXCLUDED: "excluded-row",
    UNDECODABLE: "damaged-audio",
    "too short": "clip-too-short",
    "too long": "clip-too-long",
    "alphabet": "outside-alphabet",
    "few words": "few-words",
    "empty column": "empty-column",
    "signals of different length": "different-lengths",
}
#: Fields that a spreadsheet would take for a formula, also if an apostrophe precedes them already.
_FORMULA = r"'*[=+\-@\t\r]"
_COLUMNS = ("split", "ID", "wav", "reason", "detail", "size", "modified", "code")


def rows(split: str, reason: str, ids: Sequence[str], wavs: Sequence[str], details: Sequence[str], *,
         codes: Sequence[str] | None = None, versions: bool = False) -> pa.Table:
    """Make a table of N rows left out for one reason.

    details : what exactly is wrong with each
    codes : of each, by default that of the reason
    versions : whether it has the size and date of their files
    """
    if codes is None:
        codes = [CODES.get(reason, "")] * len(ids)
    file_versions = [file_version(wav) for wav in wavs] if versions else [("", "")] * len(ids)
    sizes, dates = zip(*file_versions, strict=True)
    columns = ([split] * len(ids), ids, wavs, [reason] * len(ids), details, sizes, dates, codes)
    return pa.table([pa.array(column, pa.large_string()) for column in columns], names=_COLUMNS)


def write(folder: Path, tables: Iterable[pa.Table]) -> None:
    """Write ``left_out.csv``, even if it has no rows."""
    none = pa.table([pa.array([], pa.large_string())] * len(_COLUMNS), names=_COLUMNS)
    write_guarded(folder / NAME, pa.concat_tables([none, *tables]))


def read(folder: Path) -> pa.Table:
    """Read ``left_out.csv``."""
    path = folder / NAME
    if "code" in header(path):
        return read_guarded(path, _COLUMNS)
    table = read_guarded(path, _COLUMNS[:-1])  # by an earlier version, without codes
    codes = [CODES.get(reason, "") for reason in table["reason"].to_pylist()]
    return table.append_column("code", pa.array(codes, pa.large_string()))


def write_guarded(path: Path, table: pa.Table) -> None:
    """Write a CSV, with an apostrophe before what a spreadsheet would take for a formula."""
    with atomic_write(path, "wb") as file:
        pacsv.write_csv(_replaced(table, f"^({_FORMULA})", r"'\1"), file)


def read_guarded(path: Path, names: Sequence[str], hint: str | None = None) -> pa.Table:
    """Read columns of a CSV by :func:`write_guarded`; ``hint`` is that of the error about a missing one."""
    csv = read_delimited(path)
    return _replaced(pa.table([csv.need(name, hint=hint) for name in names], names=names), f"^'({_FORMULA})", r"\1")


def _replaced(table: pa.Table, pattern: str, replacement: str) -> pa.Table:
    columns = [pc.replace_substring_regex(column, pattern, replacement) for column in table.columns]
    return pa.table(columns, names=table.column_names)


def find_repaired(folder: Path) -> str | None:
    """Return a recording that was left out and has appeared or changed since then; None if there is none.

    Others are not checked: asking for all files of a large corpus takes minutes on a network file system.
    """
    table = read(folder)
    reason = table["reason"]
    wavs = table["wav"]
    # A URL that isn't allowed is missing from a further column, too, but isn't a file that could appear.
    is_file = pc.invert(pc.match_substring(wavs, "://"))
    gone = Column(pc.filter(wavs, pc.and_(pc.equal(reason, MISSING), is_file)))
    if len(gone):
        has_appeared = existing(gone)
        if has_appeared.any():
            return gone[int(has_appeared.argmax())]
    bad = pc.equal(reason, UNDECODABLE)
    rows = zip(*(Column(pc.filter(table[name], bad)) for name in ("wav", "size", "modified")), strict=True)
    return next((wav for wav, *version in rows if tuple(version) != file_version(wav)), None)
