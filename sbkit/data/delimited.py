"""Reads CSV and TSV files into Arrow columns: millions of rows in seconds, errors that name the row."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv

from sbkit.errors import SbkitError

# A row never straddles two blocks unless it is longer than this.
_BLOCK_BYTES = 16 << 20


@dataclass
class Delimited:
    """A file's columns by name, all of them text, and the rows whose number of fields was wrong."""

    path: Path
    columns: dict[str, pa.ChunkedArray]
    malformed: list[tuple[int, str]] = field(default_factory=list)  # (line, what was wrong)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def find(self, *names: str) -> pa.ChunkedArray | None:
        """The first column that has one of ``names``."""
        return next((self.columns[name] for name in names if name in self.columns), None)

    def need(self, *names: str, hint: str | None = None) -> pa.ChunkedArray:
        """The first column that has one of ``names``, or an error that lists what the file has."""
        column = self.find(*names)
        if column is None:
            wanted = " or ".join(repr(name) for name in names)
            raise SbkitError(
                f"{self.path} has no column {wanted} (its columns: {', '.join(self.columns) or 'none'})",
                hint=hint,
            )
        return column


def read_delimited(path: str | Path, *, delimiter: str = ",", quoted: bool = True) -> Delimited:
    """Read a whole file. ``quoted=False``: a quotation mark is a character like any other.

    A byte order mark, Windows line ends and blank lines are tolerated; column names are stripped.
    """
    path = Path(path)
    try:
        header_line = _first_line(path)
        names = _header(path, header_line, delimiter, quoted)
        if quoted and f"{delimiter} " in header_line:
            return _read_spaced(path, names, delimiter)
        return _read_arrow(path, names, delimiter, quoted)
    except UnicodeDecodeError as error:
        raise SbkitError(f"{path}, line 1: not UTF-8 ({error.reason})", hint="save it as UTF-8") from None
    except FileNotFoundError:
        raise SbkitError(f"{path}: no such file") from None
    except OSError as error:
        raise SbkitError(f"{path}: cannot be read ({error.strerror or error})") from None


def _first_line(path: Path) -> str:
    with open(path, "rb") as file:
        for raw in file:
            line = raw.decode("utf-8-sig").strip("\r\n")
            if line.strip():
                return line
    raise SbkitError(f"{path} is empty", hint="expected a header line with column names")


def _header(path: Path, line: str, delimiter: str, quoted: bool) -> list[str]:
    if quoted:
        names = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True))
    else:
        names = line.split(delimiter)
    names = [name.strip() for name in names]
    repeated = sorted({name for name in names if name and names.count(name) > 1})
    if repeated:
        raise SbkitError(f"{path}, line 1: the column {repeated[0]!r} is there twice")
    return [name or f"column {i}" for i, name in enumerate(names, 1)]


def _read_arrow(path: Path, names: Sequence[str], delimiter: str, quoted: bool) -> Delimited:
    malformed: list[tuple[int, str]] = []

    def on_bad_row(row: pacsv.InvalidRow) -> str:
        malformed.append((row.number or 0, _wrong_fields(row.expected_columns, row.actual_columns)))
        return "skip"

    def read(threads: bool) -> pa.Table:
        return pacsv.read_csv(
            path,
            read_options=pacsv.ReadOptions(
                use_threads=threads, block_size=_BLOCK_BYTES, column_names=[*names], skip_rows=1,
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=delimiter, quote_char='"' if quoted else False, newlines_in_values=quoted,
                invalid_row_handler=on_bad_row,
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.large_string()), strings_can_be_null=False,
            ),
        )

    try:
        table = read(threads=True)
        if malformed:  # the parser knows line numbers only when it runs in one thread
            malformed.clear()
            table = read(threads=False)
    except pa.ArrowInvalid as error:
        if "Empty CSV" in str(error):
            table = pa.table({name: pa.array([], pa.large_string()) for name in names})
        else:
            raise SbkitError(f"{path}{_where_not_utf8(path)}: {error}") from None
    return Delimited(path, {name: table.column(name) for name in names}, malformed)


def _read_spaced(path: Path, names: Sequence[str], delimiter: str) -> Delimited:
    """``ID, duration, wav``: a blank after each comma, which only Python's slower reader knows."""
    rows, malformed = [], []
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
        next(reader)
        for row in reader:
            if len(row) == len(names):
                rows.append(row)
            elif row:
                malformed.append((reader.line_num, _wrong_fields(len(names), len(row))))
    columns = {
        name: pa.chunked_array([pa.array([row[i] for row in rows], pa.large_string())])
        for i, name in enumerate(names)
    }
    return Delimited(path, columns, malformed)


def _wrong_fields(expected: int, found: int) -> str:
    return f"{found} fields instead of {expected}"


def _where_not_utf8(path: Path) -> str:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return f", line {number}"
    return ""
