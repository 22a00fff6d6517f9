"""CSV and TSV files as Arrow columns: millions of rows are read in seconds, and errors name the line."""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.csv as pacsv

from sbkit.errors import SbkitError, shown, shown_names
from sbkit.system import untrusted

# A row never straddles two blocks unless it is longer than this.
_BLOCK_BYTES = 16 << 20
_ROWS_AT_ONCE = 65_536
# Limits of a header.
_MAX_HEADER_BYTES = 1 << 20
_MAX_COLUMNS = 10_000
_SAID = re.compile(r'"?sep=([,;\t|])"?')
# Appended as a last line: it becomes a separate row unless a quotation mark is still open. No UTF-8 decodes to it.
_END = "\udcff"


@dataclass
class Delimited:
    """A file's columns by name, all as text, and the lines whose number of fields is wrong."""

    path: Path
    columns: dict[str, pa.ChunkedArray]
    malformed: list[tuple[int, str]] = field(default_factory=list)
    """(line number, what is wrong with it)"""
    header: Sequence[str] = ()
    """Names of all columns, including those that were not read."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def find(self, *names: str) -> pa.ChunkedArray | None:
        """The first column with one of these names, None if there is none."""
        return next((self.columns[name] for name in names if name in self.columns), None)

    def need(self, *names: str, hint: str | None = None) -> pa.ChunkedArray:
        """The first column with one of these names; if there is none, the error lists the file's columns."""
        column = self.find(*names)
        if column is None:
            wanted = " or ".join(repr(name) for name in names)
            raise SbkitError("missing-column", f"{self.path} has no column {wanted} (its columns: "
                             f"{shown_names(self.header or self.columns)})", hint=hint, file=self.path, key=names[0])
        return column


def read_delimited(path: str | Path, *, delimiter: str | None = None, quoted: bool = True,
                   only: Collection[str] | None = None) -> Delimited:
    """Read all columns of a file, or those in ``only``.

    The delimiter is a comma, or a semicolon if the header has more of these outside of quotation marks, as some
    spreadsheets write it; a first line such as ``sep=;``, which Excel writes and reads, says it.
    With ``quoted=False`` a quotation mark is an ordinary character.
    A byte order mark, Windows line ends and blank lines are allowed; column names are stripped.
    """
    path = Path(path)
    with _plain_errors(path):
        skip, header_line, said = _first_line(path)
        delimiter = delimiter or said
        names = _header(path, header_line, delimiter, quoted)
        wanted = [name for name in names if only is None or name in only]
        if not wanted:
            return Delimited(path, {}, header=names)
        spaced = quoted and f"{delimiter} " in header_line  # such as ``ID, duration, wav``, which Arrow doesn't strip
        columns = None if spaced else _read_arrow(path, names, wanted, skip, delimiter, quoted)
        if columns is not None:
            return Delimited(path, columns, header=names)
        # Row by row, slower than Arrow, to find the line that has an error.
        malformed: list[tuple[int, str]] = []
        chunks: dict[str, list[pa.Array]] = {name: [] for name in wanted}
        with open(path, encoding="utf-8", errors="surrogateescape", newline="" if quoted else None) as file:
            lines = _lines(path, file, names, skip, delimiter)
            plain = ((number, line.rstrip("\n").split(delimiter)) for number, line in enumerate(lines, skip + 1)
                     if line != "\n")
            rows = _quoted_rows(path, lines, skip, delimiter, spaced) if quoted else plain
            while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
                malformed += [(line, f"{len(row)} fields instead of {len(names)}") for line, row in some
                              if row and len(row) != len(names)]
                for name, chunk in chunks.items():
                    place = names.index(name)
                    chunk.append(pa.array([row[place] for _, row in some if len(row) == len(names)], pa.large_string()))
        columns = {name: pa.chunked_array(chunk, pa.large_string()) for name, chunk in chunks.items()}
        return Delimited(path, columns, malformed, names)


def header(path: str | Path, *, delimiter: str | None = None, quoted: bool = True) -> list[str]:
    """Read the names of a file's columns alone."""
    path = Path(path)
    with _plain_errors(path):
        _, line, said = _first_line(path)
        return _header(path, line, delimiter or said, quoted)


@contextlib.contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise SbkitError("not-utf8", f"{path}, line 1: not UTF-8 ({error.reason})", hint="save it as UTF-8", file=path,
                         line=1) from None
    except FileNotFoundError:
        raise SbkitError("no-such-path", f"{path}: no such file", file=path) from None
    except OSError as error:
        raise SbkitError("not-readable", f"{path}: cannot be read ({error.strerror or error})", file=path) from None


def _first_line(path: Path) -> tuple[int, str, str]:
    """(number, content, probable delimiter) of the header: the first line that isn't blank, nor Excel's ``sep=;``."""
    said = None
    with untrusted.open_regular(path) as file:
        for number, raw in enumerate(iter(lambda: file.readline(_MAX_HEADER_BYTES), b""), 1):
            line = raw.decode("utf-8-sig").strip("\r\n")
            if line.strip():
                if len(raw) == _MAX_HEADER_BYTES:
                    raise SbkitError("malformed-list", f"{path}, line {number}: the header is too long",
                                     hint="is it a CSV or TSV file?", file=path, line=number)
                if said is None and (said := _SAID.fullmatch(line)):
                    continue
                unquoted = re.sub('"[^"]*"', "", line)
                return number, line, said[1] if said else ";" if unquoted.count(";") > unquoted.count(",") else ","
    raise SbkitError("no-utterances", f"{path} is empty", hint="expected a header line with column names", file=path)


def _header(path: Path, line: str, delimiter: str, quoted: bool) -> list[str]:
    if quoted:
        try:
            names = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True))
        except csv.Error as error:
            raise SbkitError("malformed-list", f"{path}, line 1: not a header: {error}",
                             hint="is it a CSV or TSV file?", file=path, line=1) from None
    else:
        names = line.split(delimiter)
    names = [name.strip() for name in names]
    if len(names) > _MAX_COLUMNS:
        raise SbkitError("malformed-list", f"{path}, line 1: {len(names):,} columns, but at most {_MAX_COLUMNS:,} are "
                         "allowed", hint="is it a CSV or TSV file?", file=path, line=1)
    if repeated := sorted(name for name, count in Counter(names).items() if name and count > 1):
        raise SbkitError("duplicate-column", f"{path}, line 1: the column {shown(repeated[0])} appears twice",
                         file=path, line=1, key=repeated[0])
    return [name or f"column {i}" for i, name in enumerate(names, 1)]


def _read_arrow(path: Path, names: Sequence[str], wanted: Sequence[str], skip: int, delimiter: str,
                quoted: bool) -> dict[str, pa.ChunkedArray] | None:
    """Read columns; None if a row has too few or too many fields, or isn't UTF-8: Arrow doesn't say in which line."""
    try:
        table = pacsv.read_csv(
            path, read_options=pacsv.ReadOptions(block_size=_BLOCK_BYTES, column_names=[*names], skip_rows=skip),
            parse_options=pacsv.ParseOptions(delimiter=delimiter, quote_char='"' if quoted else False,
                                             newlines_in_values=quoted),
            convert_options=pacsv.ConvertOptions(column_types=dict.fromkeys(names, pa.large_string()),
                                                 strings_can_be_null=False, include_columns=[*wanted]))
    except pa.ArrowInvalid:  # also where no line follows the header
        return None
    # With an unclosed quotation mark Arrow takes the rest of the file as one field.
    suspicious = quoted and len(table) and any("\n" in column[-1].as_py() for column in table.columns)
    return None if suspicious else {name: table.column(name) for name in wanted}


def _lines(path: Path, file: IO[str], names: Sequence[str], skip: int, delimiter: str) -> Iterator[str]:
    """The lines after the first ``skip``."""
    for number, line in enumerate(iter(lambda: file.readline(_BLOCK_BYTES), ""), 1):
        if len(line) == _BLOCK_BYTES:
            raise SbkitError("malformed-list", f"{path}, line {number}: the line is too long",
                             hint="is it a CSV or TSV file?", file=path, line=number)
        if number > skip:
            try:
                line.encode()
            except UnicodeEncodeError as error:  # bytes that aren't UTF-8 were decoded to surrogates
                name = names[min(line[: error.start].count(delimiter), len(names) - 1)]
                raise SbkitError("not-utf8", f"{path}, line {number}, column {shown(name)}: not UTF-8",
                                 hint="save it as UTF-8", file=path, line=number, key=name) from None
            yield line


def _quoted_rows(path: Path, lines: Iterator[str], skip: int, delimiter: str,
                 spaced: bool) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of each row of a file whose first ``skip`` lines were read already."""
    reader = csv.reader(itertools.chain(lines, [_END]), delimiter=delimiter, skipinitialspace=spaced)
    begins = skip + 1
    try:
        for row in reader:
            if row == [_END]:
                return
            if row and row[-1].endswith(_END):
                break
            yield skip + reader.line_num, row
            begins = skip + reader.line_num + 1
    except csv.Error as error:  # mostly a field that is longer than the csv module allows
        if "NUL" in str(error):
            raise SbkitError("malformed-list", f"{path}, line {skip + reader.line_num}: it has a character of value 0, "
                             "which Python 3.10 can't read", hint="remove it, or use a later Python", file=path,
                             line=skip + reader.line_num) from None
    raise SbkitError("malformed-list", f"{path}, line {begins}: a quotation mark opens a field here and is never "
                     "closed", hint="close it, or double the quotation marks that are part of a text", file=path,
                     line=begins)
