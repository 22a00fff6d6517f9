"""JSON lines as NeMo and ESPnet write them, and SpeechBrain's JSON, with one object per utterance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from sbkit.data.manifest import MAX_SECONDS, Column
from sbkit.data.sources.base import ALIASES, META_ALIASES, Rows, names_of, no_column, unique_ids
from sbkit.data.sources.files import FileSource, lines, stripped
from sbkit.errors import SbkitError, is_storable, shown
from sbkit.system import untrusted
from sbkit.system.console import progress

_WORTH_A_BAR = 50e6  # bytes
_HEADER_ROWS = 100  # rows that are read to find the columns
#: Largest file that is read as a whole: ten million utterances.
_MAX_BYTES = 1 << 31


class JsonLines(FileSource):
    """Files of objects with a path and a text (``audio_filepath`` and ``text`` in NeMo; see ``ALIASES`` for others).

    ``duration`` and ``offset`` are in seconds; missing durations are measured. A file may also be a single array, or a
    single object of objects by id, as in SpeechBrain.
    """

    kind = "JSON lines"
    suffixes = (".jsonl", ".json", ".ndjson")

    def header(self, name: str) -> list[str]:
        items = (item for _, item in itertools.islice(_objects(self.files[name]), _HEADER_ROWS))
        return list(dict.fromkeys(key for item in items if isinstance(item, dict) for key in item))

    def read_file(self, path: Path, show_progress: bool) -> Rows:
        further = tuple(role for role in self.wanted if role not in ALIASES)
        names = {role: (self.columns[role],) if role in self.columns else names_of(role)
                 for role in (*ALIASES, *META_ALIASES, *further)}
        columns: dict[str, list[Any]] = {role: [] for role in names}  # texts, except start and duration
        malformed: list[tuple[str, str]] = []
        keys: dict[str, None] = {}  # all names, for the error about a missing role
        missing_roles = set(self.needed)
        for line, item in progress(_objects(path), what=f"reading {path.name}", unit="row",
                                   show=show_progress and path.stat().st_size > _WORTH_A_BAR):
            try:
                if isinstance(item, ValueError):
                    raise item
                if not isinstance(item, dict):
                    raise ValueError("not a JSON object")
                values: dict[str, Any] = {}
                for role, names_of_role in names.items():
                    values[role] = next((item[name] for name in names_of_role if item.get(name) is not None), None)
                keys.update(dict.fromkeys(item))
                missing_roles -= {role for role, value in values.items() if value is not None}
                if values["audio"] is None:
                    raise ValueError("no audio path")
                start = float(values["start"] or 0.0)
                duration = float(values["duration"] or "nan")
                if not 0 <= start <= MAX_SECONDS or duration < 0:
                    raise ValueError(f"start {start}, duration {duration}")
                row: dict[str, Any] = {role: _text(role, value) for role, value in values.items()}
                if values["id"] is None:
                    row["id"] = None
                row["start"] = start
                row["duration"] = duration
                for role, value in row.items():  # only now, so that all columns have the same rows
                    columns[role].append(value)
            except (TypeError, ValueError, OverflowError) as error:
                malformed.append((f"{path.name} line {line}", str(error)))
        for role in self.needed:
            if keys and role in missing_roles:
                raise no_column(path, role, keys, self.columns)
        derived = [PurePosixPath(audio).stem + (f"-{start:.2f}" if start else "")
                   for audio, start in zip(columns["audio"], columns["start"], strict=True)]
        if any(id_ is not None for id_ in columns["id"]):
            ids = [stem if id_ is None else id_ for id_, stem in zip(columns["id"], derived, strict=True)]
        else:
            ids = unique_ids(derived)
        meta = {name: Column(columns[name]) for name in dict.fromkeys((*META_ALIASES, *further))
                if name in further or any(columns[name])}
        return Rows(
            str(path), ids, self.locate(Column(columns["audio"]), path), columns["text"], columns["speaker"],
            np.array(columns["duration"], float), np.array(columns["start"], float), self.with_paths(meta, path),
            malformed)


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield line number and object of each utterance; for a broken line, an error instead of the object."""
    whole = _whole(path)
    if whole is not None:
        yield from enumerate(whole, 1)
        return
    for number, line in lines(path):
        try:
            yield number, untrusted.parse_json(line)
        except ValueError as error:
            yield number, ValueError(f"not JSON ({error})")


def _whole(path: Path) -> list[Any] | None:
    """Return the utterances of a file that is one array or SpeechBrain's object of objects; None for JSON lines.

    A file with a broken first line counts as JSON lines if another line is an utterance.
    """
    _, first = next(lines(path), (0, None))
    if first is None:
        return []
    if _is_row(first):
        return None
    try:
        data = untrusted.parse_json(stripped(untrusted.read_bytes(path, _MAX_BYTES)))
        if isinstance(data, dict):
            return [_with_id(id_, item) if isinstance(item, dict) else item for id_, item in data.items()]
        return data if isinstance(data, list) else [data]
    except OSError as error:
        raise SbkitError("not-readable", f"{path}: cannot be read ({error.strerror or error})", file=path) from None
    except ValueError as error:
        what = f"not UTF-8 ({error})" if isinstance(error, UnicodeDecodeError) else str(error)
    # Outside of the handler, because the error holds the whole text, and a file may be one line.
    if first != b"[" and any(_is_row(line) for _, line in lines(path)):  # "[" begins an array that was cut off
        return None
    raise SbkitError("malformed-list", f"{path}: neither JSON lines nor one JSON text: {what}",
                     hint='expected lines such as {"audio_filepath": "a.wav", "text": "the transcript"}', file=path)


def _with_id(id_: str, item: dict[str, Any]) -> dict[str, Any]:
    """Return an utterance of an object of objects like one of JSON lines."""
    named = {"ID": id_}
    # SpeechBrain's templates call a text "words", which elsewhere is a count, or words with their times.
    if isinstance(item.get("words"), str):
        named["wrd"] = item["words"]
    return {**named, **item}


def _is_row(line: bytes) -> bool:
    """Whether a line is an utterance, and not (the beginning of) an object of objects."""
    try:
        item = untrusted.parse_json(line)
    except ValueError:
        return False
    return isinstance(item, dict) and not all(isinstance(value, dict) for value in item.values())


def _text(role: str, value: object) -> str:
    """Return a value as text; a ValueError if it has what no list should. A transcript may have several lines."""
    if value is None:
        return ""
    text = str(value)
    if not is_storable(text.replace("\r\n", "\n") if role == "text" else text):
        raise ValueError(f"its {role} has a character that can't be printed: {shown(text)}")
    return text
