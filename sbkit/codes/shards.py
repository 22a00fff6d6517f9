"""Codes of a corpus on disk: shards, and a manifest with the codec and the list of shards.

    FOLDER/manifest.json               the codebooks, and each shard's utterances, frames, size and sha256
    FOLDER/codes-00000.safetensors     codes [frames, levels], rows (JSON), and the ends of each utterance

Nothing in it is a pickle. A folder appears completely or not at all; the sizes in a damaged file are compared with the
file's size before memory is allocated, and each utterance is read separately.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sbkit.codes.books import Books, InvalidCode
from sbkit.data import publish
from sbkit.errors import SbkitError, first_line, shown
from sbkit.system import disk, untrusted
from sbkit.system.schema import SHA256, Record, String, integer

MANIFEST = "manifest.json"
FORMAT, VERSION = "sbkit codes", 1


def _files_in(manifest: Mapping[str, Any]) -> list[str]:
    """Return the files that a folder of codes has beside its manifest."""
    from sbkit.data.exclusions import NAME  # here, as it imports pyarrow, which running a codec doesn't need

    return [NAME, *(shard["file"] for shard in manifest["shards"])]


FOLDER = publish.FolderKind("a folder of codes", MANIFEST, FORMAT, _files_in)
#: Limits of a shard: about six hours at 50 frames per second.
MAX_FRAMES, MAX_ROWS, MAX_ROW_BYTES = 1 << 20, 1 << 16, 1 << 20
_MANIFEST_BYTES = 64 << 20
_COUNTS = ("utterances", "frames", "bytes")
#: Types of codes by safetensors' names; numpy has no name for some other types.
_WHOLE = frozenset(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64))
_SHARD = Record({
    "file": String(13, 255, r"[\w-]+\.safetensors"), "utterances": integer(maximum=MAX_ROWS),
    "frames": integer(maximum=MAX_FRAMES), "bytes": integer(maximum=2**63), "sha256": SHA256}, needed=True)
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
        start = int(ends[index - 1]) if index else 0
        return self._file.get_slice(name)[start : int(ends[index])]

    @cached_property
    def _file(self) -> Any:  # safetensors' reader is untyped
        """Open the file, if it is the one that the manifest describes."""
        try:
            size = self.path.stat().st_size
        except OSError:
            raise SbkitError("damaged-codes", f"{self.path} is missing", hint=_REPAIR, file=self.path) from None
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
        codes = shapes.get("codes", [])
        rows = shapes.get("rows", [])
        is_right = (len(shapes) == 4 and len(codes) == 2 and codes[0] == self.frames and len(rows) == 1
                    and shapes.get("ends") == [self.utterances] and shapes.get("row_ends") == [self.utterances])
        if not is_right:
            raise self._damaged(f"it holds {shapes}")
        codes_type = self._file.get_slice("codes").get_dtype()
        if codes_type not in _WHOLE:
            raise self._damaged(f"codes must be whole numbers, not {codes_type}")
        rows_type = self._file.get_slice("rows").get_dtype()
        if rows_type != "U8":
            raise self._damaged(f"rows must be bytes, not {rows_type}")
        return {"ends": self._read_ends("ends", self.frames, MAX_FRAMES),
                "row_ends": self._read_ends("row_ends", rows[0], MAX_ROW_BYTES)}

    def _read_ends(self, name: str, last: int, max_length: int) -> np.ndarray:
        """Read the ends of parts of 1 to ``max_length`` items, of which the last one is ``last``."""
        ends = self._file.get_tensor(name)
        lengths = np.diff(ends, prepend=0)
        if ends.dtype != np.int64 or lengths.min() < 1 or lengths.max() > max_length or ends[-1] != last:
            raise self._damaged(f"{name} are not valid ends of utterances")
        return ends

    def _damaged(self, what: str) -> SbkitError:
        return SbkitError("damaged-codes", f"{self.path} is damaged: {what}", hint=_REPAIR, file=self.path)

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


class UnstorableUtterance(SbkitError):
    """Raised for an utterance that can't be stored: ``.cause`` says why, such as too many frames or too much text."""

    def __init__(self, id: str, cause: str):
        name = id[:100].encode(errors="backslashreplace").decode()
        super().__init__("unstorable-utterance", f"{name}: {cause}", value=name)
        self.id, self.cause = id, cause


@dataclass(frozen=True)
class CodedUtterance:
    """An utterance's codes [T, Q] int64, text and speaker."""

    id: str
    codes: np.ndarray
    text: str | None = None
    speaker: str | None = None


class Codes:
    """Reads a folder of codes; one of another codec is refused before any code is read.

    >>> codes = Codes("tokens", books)      # doctest: +SKIP
    >>> codes[0].codes                      # [T, Q], each id within its codebook    # doctest: +SKIP

    folder : made by :func:`writing`
    books : the codebooks that the codes must belong to; None: any, see :attr:`books`
    """

    def __init__(self, folder: str | Path, books: Books | None = None):
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        try:
            values = untrusted.read_json(path, _MANIFEST_BYTES)
        except FileNotFoundError:
            hint = "sbkit tokenize creates a folder of codes"
            if not self.folder.is_dir():
                raise SbkitError("no-such-path", f"{self.folder} does not exist", hint=hint, file=self.folder) from None
            raise SbkitError("not-codes", f"{self.folder} has no codes: there is no {MANIFEST} in it", hint=hint,
                             file=self.folder) from None
        except OSError as error:
            raise SbkitError("not-readable", f"{path} cannot be read: {error.strerror or error}", file=path) from error
        except ValueError as error:
            raise SbkitError("damaged-codes", f"{path} cannot be read: {first_line(error)}", hint=_REPAIR,
                             file=path) from error
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise SbkitError("not-codes", f"{path} is not the manifest of a folder of codes", file=path)
        if values.get("version") != VERSION:
            raise SbkitError("newer-version", f"{path} has version {shown(values.get('version'))}, but this sbkit "
                             f"reads version {VERSION}", hint="install a newer sbkit", file=path,
                             value=values.get("version"))
        self.books = Books.from_dict(values.get("books"), f"{path}: books")
        shards = values.get("shards")
        self.made_from = values.get("made_from")
        if not isinstance(shards, list) or not shards or not all(shard in _SHARD for shard in shards):
            raise SbkitError("damaged-codes", f"{path}: shards must be a list that gives each file's name, utterances, "
                             "frames, size and sha256", hint=_REPAIR, file=path, key="shards")
        if not isinstance(self.made_from, str | None):
            raise SbkitError("damaged-codes", f"{path}: made_from must be a text", hint=_REPAIR, file=path,
                             key="made_from")
        if books is not None:
            books.require(self.books, str(path))
        self._shards = [Shard(self.folder / shard.pop("file"), **shard) for shard in shards]
        self._starts = [0, *accumulate(shard.utterances for shard in self._shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> CodedUtterance:
        """Read an utterance; raises ``InvalidCode`` if an id isn't in its codebook."""
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} utterances, but not number {index}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        shard = self._shards[number]
        row, codes = shard.read(index - self._starts[number])
        return CodedUtterance(codes=self.books.check(codes, f"{shard.path}, {row['id']}"), **row)

    def __iter__(self) -> Iterator[CodedUtterance]:
        return (self[index] for index in range(len(self)))

    @property
    def ids(self) -> list[str]:
        """The id of each utterance, without reading their codes."""
        return [shard.row(index)["id"] for shard in self._shards for index in range(shard.utterances)]

    def check(self) -> None:
        """Raise if an id of any utterance isn't in its codebook."""
        first: InvalidCode | None = None
        count = 0
        for index in range(len(self)):
            try:
                self[index]
            except InvalidCode as error:
                first = first or error
                count += 1
        if first is not None:
            raise InvalidCode(f"{first.message}; {count} of {len(self)} utterances have such ids", first.position,
                              first.level, first.id, hint=first.hint)


class CodesWriter:
    """Writes utterances into the shards of a folder."""

    def __init__(self, folder: Path, books: Books, shard_frames: int, made_from: str | None):
        self.folder = folder
        """Other files written here become part of the folder."""
        self._books = books
        self._max_frames = shard_frames
        self._made_from = made_from
        self._ids: set[str] = set()
        self._codes: list[np.ndarray] = []
        self._rows: list[bytes] = []
        self._frames = 0
        self._shards: list[dict[str, Any]] = []

    def add(self, id: str, codes: ArrayLike, text: str | None = None, speaker: str | None = None) -> None:
        """Append an utterance's codes [T, Q].

        Raises ``InvalidCode`` if an id isn't in its codebook, and ``UnstorableUtterance`` if the utterance is too large
        or not valid Unicode. Earlier utterances are kept, and others can be added.
        """
        if not id:
            raise SbkitError("bad-codes", "an utterance has no id")
        if id in self._ids:
            raise SbkitError("repeated-id", f"two utterances have the id {id!r}", value=id)
        codes_TQ = self._books.check(codes, id)
        if codes_TQ.ndim != 2 or not len(codes_TQ):
            raise SbkitError("bad-codes", f"{id}: the codes of an utterance must be [frames, levels] with at least one "
                             f"frame, not {list(codes_TQ.shape)}", value=id)
        if len(codes_TQ) > MAX_FRAMES:
            raise UnstorableUtterance(id, f"it has {len(codes_TQ):,} frames, but at most {MAX_FRAMES:,} are allowed")
        facts = {"id": id}
        if text is not None:
            facts["text"] = text
        if speaker is not None:
            facts["speaker"] = speaker
        if not is_valid_unicode(facts.values()):
            raise UnstorableUtterance(id, "its id, text or speaker is not valid Unicode")
        row = json.dumps(facts).encode()
        if len(row) > MAX_ROW_BYTES:
            raise UnstorableUtterance(id, f"its id, text and speaker have {disk.size(len(row))}, but at most "
                              f"{disk.size(MAX_ROW_BYTES)} are allowed")
        is_full = self._frames + len(codes_TQ) > self._max_frames or len(self._rows) == MAX_ROWS
        if self._codes and is_full:
            self._write()
        self._ids.add(id)
        self._codes.append(codes_TQ.astype(self._books.dtype))
        self._rows.append(row)
        self._frames += len(codes_TQ)

    def close(self) -> None:
        """Write the last shard and the manifest."""
        if self._codes:
            self._write()
        if not self._shards:
            raise SbkitError("no-utterances", "there are no codes to write: no utterance was added", file=self.folder)
        manifest = {"format": FORMAT, "version": VERSION, "books": self._books.to_dict(), "shards": self._shards}
        if self._made_from is not None:
            manifest["made_from"] = self._made_from
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")

    def _write(self) -> None:
        path = self.folder / f"codes-{len(self._shards):05d}.safetensors"
        tensors = {"codes": np.concatenate(self._codes), "ends": np.cumsum([len(codes) for codes in self._codes]),
                   "rows": np.frombuffer(b"".join(self._rows), np.uint8),
                   "row_ends": np.cumsum([len(row) for row in self._rows])}
        save_file(tensors, path)
        path.chmod(0o644)  # safetensors makes it readable by the owner only
        shard = Shard(path, len(self._rows), len(tensors["codes"]), path.stat().st_size, disk.sha256(path))
        self._shards.append(shard.to_dict())
        self._codes = []
        self._rows = []
        self._frames = 0


@contextlib.contextmanager
def writing(folder: str | Path, books: Books, force: bool = False, shard_frames: int = MAX_FRAMES,
            made_from: str | None = None) -> Iterator[CodesWriter]:
    """Write a folder of codes, which appears when the block ends without an error.

    >>> with writing("tokens", books) as out:       # doctest: +SKIP
    ...     out.add("utt-1", codes, text="hello")

    folder : is created, or replaced with ``force``
    books : the codebooks of all codes
    shard_frames : maximum frames of a shard
    made_from : compare it with :attr:`Codes.made_from` to see whether codes must be created again
    """
    to = Path(folder).resolve()
    publish.clean_up(to, FOLDER)
    check_place(folder, force)
    with publish.temporary_folder(to, FOLDER) as temporary:
        out = CodesWriter(temporary, books, min(shard_frames, MAX_FRAMES), made_from)
        yield out
        out.close()
        publish.publish(temporary, to, FOLDER, force)


def check_place(folder: str | Path, force: bool) -> None:
    """Raise if a folder exists and must not be replaced, or if it isn't a folder of codes."""
    to = Path(folder).resolve()
    if to.exists() and not force:
        raise SbkitError("output-exists", f"{folder} already exists",
                         hint="choose another folder, or replace it with --force", file=folder)
    FOLDER.check_replaceable(to)
