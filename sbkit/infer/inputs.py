"""Recordings named on the command line: files, folders, lists, standard input; their references and output paths."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.data.audio import SUFFIXES
from sbkit.data.remote import Remote, check_schemes, scheme_of
from sbkit.decode.file_errors import unreadable
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.formats import ModelRequest
from sbkit.infer.recordings import Recording
from sbkit.system import disk
from sbkit.system.untrusted import standard_input

if TYPE_CHECKING:  # pyarrow, which transcribing alone doesn't need
    from sbkit.data.delimited import Delimited

logger = logging.getLogger(__name__)

STDIN = "-"


@dataclass(frozen=True, kw_only=True)
class FilesRequest(ModelRequest):
    """A command's bundle, the recordings to run it on, and how.

    files : files, folders, manifests, JSON lines, ``-``
    schemes : URL schemes allowed in lists
    """

    bundle: Path
    files: Sequence[str]
    schemes: Sequence[str] = ()


def collect(names: Sequence[str], references: str | None = None, schemes: Sequence[str] = ()) -> list[Recording]:
    """Find the recordings that the names stand for, each with a unique id.

    schemes : URL schemes allowed in manifests; a URL among the names themselves is always opened
    """
    allowed = check_schemes("--schemes", schemes)
    if not names:
        raise SbkitError("missing-option", "no recordings were given",
                         hint="give files, folders, a manifest.csv, JSON lines, or - for stdin")
    recordings: list[Recording] = []
    empty = []
    for name in names:
        recordings_of_name = list(_recordings_of(name, allowed))
        recordings += recordings_of_name
        if not recordings_of_name:
            empty.append(name)
    if not recordings:
        hint = f"looked for {', '.join(SUFFIXES)}"
        if any(Path(name, layout.CONFIG).is_file() for name in names):
            hint = "that is a bundle: give it once, before the recordings"
        raise SbkitError("no-audio-files", f"there is no audio in {', '.join(names)}", hint=hint)
    if empty:
        logger.warning("There is no audio in %s: looked for %s", ", ".join(empty), ", ".join(SUFFIXES))
    _make_ids_unique(recordings)
    if references is not None:
        _set_references(recordings, references)
    return recordings


def _make_ids_unique(recordings: Sequence[Recording]) -> None:
    """Add their file's suffix to equal ids, then a number, so that their outputs don't collide."""
    counts = Counter(recording.id for recording in recordings)
    for recording in recordings:
        if counts[recording.id] > 1 and isinstance(recording.audio, str):
            recording.id += os.path.splitext(recording.audio)[1]

    counts = Counter(recording.id for recording in recordings)
    taken = set(counts)
    for recording in recordings:
        if counts[recording.id] > 1:
            numbered = (f"{recording.id}-{number}" for number in itertools.count(1))
            recording.id = next(id for id in numbered if id not in taken)
            taken.add(recording.id)


def _set_references(recordings: Sequence[Recording], references: str) -> None:
    """Give the recordings their texts in a list, by their ids or file names."""
    texts = _read_texts(Path(references))
    for recording in recordings:
        keys = [recording.id, Path(recording.id).name]
        if isinstance(recording.audio, str):
            path = Path(recording.audio)
            keys += [path.name, path.stem, recording.audio]
        recording.reference = next((texts[key] for key in keys if key in texts), recording.reference)
    if not any(recording.reference for recording in recordings):
        raise SbkitError("no-references", f"{references} has a text for none of the recordings",
                         hint="it must name them by their ids or file names", file=references)


def _recordings_of(name: str, schemes: tuple[str, ...]) -> Iterator[Recording]:
    """Yield the recordings that a name on the command line stands for."""
    if name == STDIN:
        audio = standard_input("audio", "cat clip.mp3 | sbkit ... -")
        # Saved to a file, because decoders seek in it and it may not fit in memory.
        handle, saved = tempfile.mkstemp(prefix="sbkit-stdin-")
        atexit.register(Path(saved).unlink, missing_ok=True)
        with disk.disk_errors_as_user_error(saved), open(handle, "wb") as copy:
            shutil.copyfileobj(audio.buffer, copy, 1 << 20)
        yield Recording(saved, "stdin", called="standard input")
        return
    path = Path(name)
    remote = Remote(schemes)
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()):
            # Decoded without errors: invalid UTF-8 could not be written into a transcript.
            yield Recording(str(file), os.fsencode(file.relative_to(path).with_suffix("")).decode("utf-8", "replace"))
    elif path.suffix.lower() in (".csv", ".tsv") and path.is_file():
        from sbkit.data.manifest import Manifest

        for row in Manifest.read(path):
            # Relative to the list's folder, as in training, unless only the working directory has it.
            beside = os.path.join(path.parent, row.wav)  # an absolute one stays
            only_in_working_directory = os.path.exists(row.wav) and not os.path.exists(beside)
            wav = row.wav if "://" in row.wav or only_in_working_directory else beside
            yield Recording(wav, row.id, row.start, row.duration, row.text.strip() or None, remote=remote)
    elif path.suffix.lower() in (".json", ".jsonl", ".ndjson") and path.is_file():
        from sbkit.data.manifest import MAX_SECONDS
        from sbkit.data.sources.json_lines import JsonLines

        source = JsonLines({"train": path}, {})
        source.needs_text = False
        rows = source.read("train", show_progress=False)
        for place, problem in rows.malformed:
            raise SbkitError("malformed-row", f"{path.parent / place}: {problem}", file=path)
        for i in range(len(rows)):
            seconds = float(rows.durations[i])
            duration = seconds if 0 <= seconds <= MAX_SECONDS else None  # unknown, or wrong: read to the end
            yield Recording(rows.wavs[i], rows.ids[i], float(rows.starts[i]), duration, rows.texts[i].strip() or None,
                            remote=remote)
    elif not path.exists() and "?offset=" not in name and "://" not in name:
        raise SbkitError("no-such-path", f"{name}: there is no such file or folder", file=name)
    else:
        yield Recording(name, os.fsencode(path.stem).decode("utf-8", "replace"),
                        remote=Remote(tuple(filter(None, [scheme_of(name)]))))


def lengths(recordings: Sequence[Recording], rate: int) -> list[float]:
    """The seconds of recordings by their headers; 0 for one that can't be read, which is reported later."""
    seconds = []
    for recording in recordings:
        try:
            seconds.append(recording.seconds(rate))
        except SbkitError:
            seconds.append(0.0)
    return seconds


def _read_texts(path: Path) -> dict[str, str]:
    """The texts of a list by the names of its recordings: a CSV, a TSV with a header, or lines ``name<TAB>text``."""
    from sbkit.data.delimited import header, read_delimited
    from sbkit.data.sources.base import ALIASES

    if path.suffix.lower() == ".csv":
        return _texts_by_name(read_delimited(path))
    columns: list[str] = []
    with contextlib.suppress(SbkitError):  # two equal fields, which no header has
        columns = header(path, delimiter="\t", quoted=False)
    if {*columns} & {*ALIASES["text"]}:
        return _texts_by_name(read_delimited(path, delimiter="\t", quoted=False))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    texts = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            name, tab, text = line.partition("\t")
            if not tab:
                raise SbkitError("malformed-row", f"{path}, line {number}: there is no tab between a name and a text",
                                 hint="write NAME<TAB>TEXT in each line", file=path, line=number)
            texts[name.strip()] = text.strip()
    return texts


def _texts_by_name(table: Delimited) -> dict[str, str]:
    """The texts of a table by its ids and files, and by a file's name without its folder if that is unambiguous."""
    from sbkit.data.sources.base import ALIASES

    hint = "references need the recordings' ids or files, and their texts"
    texts = table.need(*ALIASES["text"], hint=hint)
    name_columns = [column for column in (table.find(*ALIASES["id"]), table.find(*ALIASES["audio"]))
                    if column is not None]
    if table.malformed:
        line, what = table.malformed[0]
        raise SbkitError("malformed-row", f"{table.path}, line {line}: {what}",
                         hint="every row needs as many fields as the header", file=table.path, line=line)
    if not name_columns:
        name_columns = [table.need(*ALIASES["audio"], hint=hint)]  # raises

    by_name: dict[str, str] = {}
    by_base_name: dict[str, set[str]] = {}
    for column in name_columns:
        for name, text in zip(column.to_pylist(), texts.to_pylist(), strict=True):
            by_name[name] = text.strip()
            by_base_name.setdefault(os.path.basename(name), set()).add(text.strip())
    unambiguous = {name: min(alternatives) for name, alternatives in by_base_name.items() if len(alternatives) == 1}
    return unambiguous | by_name


def output_path(folder: Path, recording: Recording, suffix: str) -> Path:
    """The path of a recording's output: always in ``folder``, whatever the id contains."""
    parts = [part for part in recording.id.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    *folders, name = parts or ["_"]
    return folder.joinpath(*folders, f"{name}.{suffix}")


def check_output_paths(folder: Path, recordings: Sequence[Recording]) -> None:
    """Raise if two recordings would have the same output path, because their ids differ only in parts that it drops."""
    first: dict[Path, Recording] = {}
    for recording in recordings:
        other = first.setdefault(output_path(folder, recording, "txt"), recording)
        if other is not recording:
            raise SbkitError("same-output", f"{other.id!r} and {recording.id!r} would be written to the same file",
                             hint="change one of the ids, for example by renaming its file")
