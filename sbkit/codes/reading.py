"""Reads a folder's manifest and shards; invalid ones are refused before memory is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from sbkit.codes.books import Books
from sbkit.errors import SbkitError, first_line, shown
from sbkit.system import disk, untrusted
from sbkit.system.schema import SHA256, Integer, Record, String

MANIFEST = "manifest.json"
FORMAT, VERSION = "sbkit codes", 1
#: Limits of a shard: about six hours at 50 frames per second.
MAX_FRAMES, MAX_ROWS, MAX_ROW_BYTES = 1 << 20, 1 << 16, 1 << 20
_MANIFEST_BYTES = 64 << 20
_COUNTS = ("utterances", "frames", "bytes")
#: Types of codes by safetensors' names; numpy has no name for some other types.
_WHOLE = frozenset(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64))
_SHARD = Record({
    "file": String(13, 255, r"[\w-]+\.safetensors"), "utterances": Integer(maximum=MAX_ROWS),
    "frames": Integer(maximum=MAX_FRAMES), "bytes": Integer(maximum=2**63), "sha256": SHA256}, needed=True)
_REPAIR = "copy or create the folder again"


@dataclass
class Shard:
    """A file of codes, and its description in the manifest."""

    path: Path
    utterances: int
    frames: int
    bytes: int
    sha256: str

    def read(self, index: int) -> tuple[dict[str, str], np.ndarray]:
        """Read the row of an utterance, and its unchecked codes [T, Q]."""
        return self.row(index), self._part("codes", self._ends["ends"], index)

    def row(self, index: int) -> dict[str, str]:
        """Read the row of an utterance without its codes."""
        try:
            row = untrusted.parse_json(self._part("rows", self._ends["row_ends"], index).tobytes())
        except ValueError as error:
            raise self._damaged(f"row {index} is not JSON") from error
        if not isinstance(row, dict) or not {"id"} <= row.keys() <= {"id", "text", "speaker"} or not all(
                isinstance(value, str) for value in row.values()):
            raise self._damaged(f"row {index} must have an id, and may have a text and a speaker")
        if not is_valid_unicode(row.values()):
            raise self._damaged(f"row {index} is not valid Unicode")
        return row

    def _part(self, name: str, ends: np.ndarray, index: int) -> np.ndarray:
        return self._file.get_slice(name)[int(ends[index - 1]) if index else 0 : int(ends[index])]

    @cached_property
    def _file(self) -> Any:  # safetensors' reader is untyped
        """Open the file, if it is the one that the manifest describes."""
        try:
            size = self.path.stat().st_size
        except OSError:
            raise SbkitError(f"{self.path} is missing", hint=_REPAIR) from None
        if size != self.bytes or disk.sha256(self.path) != self.sha256:
            raise self._damaged(f"it is not the file that {MANIFEST} describes")
        try:
            return safe_open(self.path, framework="np")
        except SafetensorError as error:
            raise self._damaged(first_line(error)) from error

    @cached_property
    def _ends(self) -> dict[str, np.ndarray]:
        """The ends of each utterance's codes and row."""
        shapes = {name: self._file.get_slice(name).get_shape() for name in sorted(self._file.keys())}
        codes, bytes = shapes.get("codes", []), shapes.get("rows", [])
        if len(shapes) != 4 or len(codes) != 2 or codes[0] != self.frames or len(bytes) != 1 or any(
                shapes.get(name) != [self.utterances] for name in ("ends", "row_ends")):
            raise self._damaged(f"it holds {shapes}")
        if (kind := self._file.get_slice("codes").get_dtype()) not in _WHOLE:
            raise self._damaged(f"codes must be whole numbers, not {kind}")
        if (kind := self._file.get_slice("rows").get_dtype()) != "U8":
            raise self._damaged(f"rows must be bytes, not {kind}")
        found = {name: self._file.get_tensor(name) for name in ("ends", "row_ends")}
        for name, end, limit in (("ends", self.frames, MAX_FRAMES), ("row_ends", bytes[0], MAX_ROW_BYTES)):
            steps = np.diff(found[name], prepend=0)
            if found[name].dtype != np.int64 or steps.min() < 1 or steps.max() > limit or found[name][-1] != end:
                raise self._damaged(f"{name} are not valid ends of utterances")
        return found

    def _damaged(self, what: str) -> SbkitError:
        return SbkitError(f"{self.path} is damaged: {what}", hint=_REPAIR)

    def to_dict(self) -> dict[str, Any]:
        """Return its description for the manifest."""
        return {"file": self.path.name} | {name: getattr(self, name) for name in _COUNTS} | {"sha256": self.sha256}


def is_valid_unicode(texts: Iterable[str]) -> bool:
    """Whether texts can be written to a file: JSON may contain lone surrogates, which UTF-8 can't encode."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_manifest(folder: Path) -> tuple[Books, list[Shard], str | None]:
    """Read a folder's codebooks and shards, and what it was made from, if known."""
    path = folder / MANIFEST
    try:
        values = untrusted.read_json(path, _MANIFEST_BYTES)
    except FileNotFoundError:
        raise SbkitError(f"{folder} " + (f"has no codes: there is no {MANIFEST} in it" if folder.is_dir() else
                                         "does not exist"), hint="sbkit tokenize creates one") from None
    except (OSError, ValueError) as error:
        raise SbkitError(f"{path} cannot be read: {getattr(error, 'strerror', None) or first_line(error)}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise SbkitError(f"{path} does not describe codes")
    if values.get("version") != VERSION:
        raise SbkitError(f"{path} has version {shown(values.get('version'))}, but this sbkit reads version {VERSION}",
                         hint="install a newer sbkit")
    books = Books.from_dict(values.get("books"), f"{path}: books")
    shards = values.get("shards")
    if not isinstance(shards, list) or not shards or not all(each in _SHARD for each in shards):
        raise SbkitError(f"{path}: shards must be a list that gives each file's name, utterances, frames, size and "
                         "sha256", hint=_REPAIR)
    made_from = values.get("made_from")
    if not isinstance(made_from, str | None):
        raise SbkitError(f"{path}: made_from must be a text", hint=_REPAIR)
    return books, [Shard(folder / each.pop("file"), **each) for each in shards], made_from
