"""Parquet files of strangers: what their pages unpack to is known before they are read, a few rows at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from sbkit.errors import SbkitError
from sbkit.system import disk, untrusted

if TYPE_CHECKING:
    import datasets

#: Rows in memory at once: about 100 MB of long recordings.
BATCH = 256
#: Fewer, if that many could have more than this.
_BATCH_BYTES = 32 << 20
#: Rows need at least a byte of a file, since each names a recording of its own; this many may have less.
_ROWS_ANYHOW = 100_000
#: What a row group may unpack to whatever its size, such as recordings of silence; and all rows together, of which many
#: may repeat one value.
_GROUP_ANYHOW = 64 << 20
_ALL_ANYHOW = 256 << 20
_DICTIONARY_PAGE, _DELTA_BYTE_ARRAY = 2, 7  # the numbers of a type of page and of an encoding
_HEADER_BYTES = 1 << 12  # of a page that are read at first: most headers have fewer than 100
_HINT = "is it from a source that you trust? write it again with the recordings and texts alone"


@dataclass
class _Page:
    """What the header of a page says; the reader takes it for true, and refuses a page of another size.

    values : of a data page
    repeats : whether few bytes of it can become many: it is a dictionary, or its values share beginnings
    """

    unpacked: int
    values: int
    repeats: bool


class ParquetFiles:
    """The rows of parquet files, one after another, with the columns of the first.

    A file of a few kilobytes can unpack to terabytes: by compression, by a dictionary whose value many rows share, or
    by rows that are empty. Sizes in the footer may be wrong, so those of all pages are added up, of the columns that
    are wanted.
    """

    def __init__(self, paths: Sequence[Path]):
        self.paths = list(paths)
        with untrusted.open_regular(self.paths[0]) as file:
            self.schema = pq.read_schema(file)

    @cached_property
    def features(self) -> datasets.Features | dict[str, Any]:
        """What `datasets` knows of the columns, if it wrote the file."""
        import datasets

        of_datasets = b"huggingface" in (self.schema.metadata or {})
        return datasets.Features.from_arrow_schema(self.schema) if of_datasets else {}

    @cached_property
    def rows(self) -> int:
        count = 0
        for path in self.paths:
            with untrusted.open_regular(path) as file:
                count += pq.read_metadata(file).num_rows
        return count

    def batches(self, columns: Sequence[str], skip: int) -> Iterator[pa.Table]:
        """Yield tables of a few rows with these columns, from a row number on."""
        for path in self.paths:
            with untrusted.open_regular(path) as file, pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20
                                                                      ) as parquet:
                if lacking := [name for name in columns if name not in parquet.schema_arrow.names]:
                    raise SbkitError("missing-column", f"{path} has no column {lacking[0]}, which {self.paths[0]} has",
                                     file=path, key=lacking[0])
                rows_at_once = _check(path, file, parquet, columns)
                unpacked = 0
                limit = max(untrusted.MAX_PACKED * os.fstat(file.fileno()).st_size, _ALL_ANYHOW)
                for group in range(parquet.num_row_groups):
                    rows = parquet.metadata.row_group(group).num_rows
                    if skip >= rows:
                        skip -= rows
                        continue
                    for batch in parquet.iter_batches(rows_at_once, [group], list(columns), use_threads=False):
                        left = batch.slice(min(skip, len(batch)))
                        skip -= len(batch) - len(left)
                        if len(left):
                            table = _plain(pa.Table.from_batches([left]))
                            unpacked += table.nbytes
                            if unpacked > limit:
                                raise SbkitError("suspicious-file",
                                                 f"{path} has {disk.size(file.seek(0, os.SEEK_END))}, and its rows "
                                                 f"unpack to more than {disk.size(limit)}", hint=_HINT, file=path)
                            yield table


def _plain(table: pa.Table) -> pa.Table:
    """Return a table whose columns of dictionaries have values instead."""
    fields = [field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
              for field in table.schema]
    return table.cast(pa.schema(fields))


def _check(path: Path, file: BinaryIO, parquet: pq.ParquetFile, columns: Sequence[str]) -> int:
    """Refuse a file that unpacks to what no corpus has; return how many rows may be read at once."""
    metadata = parquet.metadata
    size = os.fstat(file.fileno()).st_size
    most_values = size + _ROWS_ANYHOW
    if metadata.num_rows > most_values:
        raise SbkitError("suspicious-file", f"{path} claims {metadata.num_rows:,} rows in {disk.size(size)}, more than "
                         "any corpus has", hint=_HINT, file=path)
    rows_at_once = BATCH
    packed_so_far = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        packed = unpacked = widest = 0
        for index in range(group.num_columns):
            column = group.column(index)
            if not _is_of(column.path_in_schema, columns):
                continue
            starts = [column.data_page_offset]
            if column.has_dictionary_page and column.dictionary_page_offset:
                starts.append(column.dictionary_page_offset)
            pages = list(_pages(path, file, min(starts), column.total_compressed_size))
            packed += column.total_compressed_size
            unpacked += sum(page.unpacked for page in pages)
            repeated = max((page.unpacked for page in pages if page.repeats), default=0)
            values = sum(page.values for page in pages)
            width = _fixed_width(parquet.schema.column(index))
            unpacked += values * width
            widest = max(widest, repeated, width)
            in_lists = parquet.schema.column(index).max_repetition_level > 0
            if values > most_values or (in_lists and values * repeated > max(untrusted.MAX_PACKED * size, _ALL_ANYHOW)):
                raise SbkitError("suspicious-file", f"{path} claims {values:,} values of {column.path_in_schema} in "
                                 f"{disk.size(size)}, more than any corpus has", hint=_HINT, file=path)
        if unpacked > max(untrusted.MAX_PACKED * packed, _GROUP_ANYHOW):
            raise SbkitError("suspicious-file", f"{path} has {disk.size(packed)} of recordings and texts that unpack "
                             f"to {disk.size(unpacked)}, more than any corpus has", hint=_HINT, file=path)
        packed_so_far += packed
        largest_row = max(widest, unpacked // max(1, group.num_rows), 1)
        rows_at_once = max(1, min(rows_at_once, _BATCH_BYTES // largest_row))
    if packed_so_far > size:
        raise SbkitError("suspicious-file", f"{path} has {disk.size(size)}, and its columns have "
                         f"{disk.size(packed_so_far)}: some overlap", hint=_HINT, file=path)
    return rows_at_once


def _is_of(path_in_schema: str, columns: Sequence[str]) -> bool:
    """Return whether the reader takes a leaf for one of these columns: by the beginning of its path, also where a
    column's own name has a dot."""
    return any(path_in_schema == name or path_in_schema.startswith(f"{name}.") for name in columns)


def _fixed_width(column: pq.ColumnSchema) -> int:
    """Return the bytes that each value takes in memory, nulls too, if the type says so and pages needn't hold them."""
    return max(0, column.length) if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else 0


def _pages(path: Path, file: BinaryIO, start: int, size: int) -> Iterator[_Page]:
    """Yield the pages of a column in a row group, by their headers alone."""
    place = start
    end = start + size
    while place < end:
        header, length = _page_header(path, file, place, end - place)
        unpacked = header.get(2)
        packed = header.get(3)
        if not isinstance(unpacked, int) or not isinstance(packed, int) or min(unpacked, packed) < 0:
            raise _damaged(path)
        is_dictionary = header.get(1) == _DICTIONARY_PAGE
        data: dict[int, Any] = next((header[field] for field in (5, 8) if isinstance(header.get(field), dict)), {})
        values = data.get(1, 0)
        if not isinstance(values, int) or values < 0:
            raise _damaged(path)
        encoding = data.get(4 if 8 in header else 2)
        yield _Page(unpacked, values, is_dictionary or encoding == _DELTA_BYTE_ARRAY)
        place += length + packed


def _page_header(path: Path, file: BinaryIO, place: int, most: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a page's header by their numbers, and its length in bytes."""
    count = min(_HEADER_BYTES, most)
    while True:
        file.seek(place)
        data = file.read(count)
        reader = _CompactReader(data)
        try:
            return reader.struct(), reader.place
        except IndexError:  # it is longer: it may hold the smallest and the largest value
            if len(data) < count or count >= most:
                raise _damaged(path) from None
            count = min(2 * count, most)
        except ValueError:
            raise _damaged(path) from None


def _damaged(path: Path) -> SbkitError:
    return SbkitError("damaged-download", f"{path} cannot be read: the header of a page is damaged",
                      hint="copy it again", file=path)


class _CompactReader:
    """Reads a struct of Thrift's compact protocol, in which parquet's headers are written.

    Values of no interest are stepped over. An IndexError says that the data ends too early.
    """

    _DEEPEST = 8  # structs within each other; a page's header has 3

    def __init__(self, data: bytes):
        self._data = data
        self.place = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > self._DEEPEST:
            raise ValueError("structs are nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            step = head >> 4
            kind = head & 15
            number = number + step if step else self._integer()
            fields[number] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:  # of any of Thrift's types
        if kind in (1, 2):  # true, false
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 7:  # double
            return self._skip(8)
        if kind == 8:  # bytes
            return self._skip(self._unsigned())
        if kind in (9, 10):  # list, set
            head = self._byte()
            length = head >> 4 if head >> 4 < 15 else self._unsigned()
            for _ in range(length):
                self._skip(1) if head & 15 in (1, 2) else self._value(head & 15, depth + 1)
            return None
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"unknown type {kind}")

    def _byte(self) -> int:
        self.place += 1
        return self._data[self.place - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("an integer is too long")

    def _integer(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, count: int) -> None:
        self.place += count
        if self.place > len(self._data):
            raise IndexError
