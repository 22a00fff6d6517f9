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
        raise SbkitError("no recordings were given",
                         hint="give files, folders, a manifest.csv, JSON lines, or - for stdin")
    found: list[Recording] = []
    empty = []
    for name in names:
        named = list(_named(name, allowed))
        found += named
        empty += [] if named else [name]
    if found and empty:
        logger.warning("There is no audio in %s: looked for %s", ", ".join(empty), ", ".join(SUFFIXES))
    if not found:
        bundle = next((name for name in names if Path(name, layout.CONFIG).is_file()), None)
        raise SbkitError(f"there is no audio in {', '.join(names)}", hint=f"looked for {', '.join(SUFFIXES)}"
                         if bundle is None else "that is a bundle: give it once, before the recordings")
    # Equal ids get their file's suffix, then a number, so that their outputs don't collide.
    times = Counter(each.id for each in found)
    for each in found:
        if times[each.id] > 1 and isinstance(each.audio, str):
            each.id += os.path.splitext(each.audio)[1]
    times = Counter(each.id for each in found)
    taken = set(times)
    for each in found:
        if times[each.id] > 1:
            each.id = next(name for number in itertools.count(1) if (name := f"{each.id}-{number}") not in taken)
            taken.add(each.id)
    if references is not None:
        texts = _texts(Path(references))
        for each in found:
            keys = [each.id, Path(each.id).name]
            if isinstance(each.audio, str):
                keys += [Path(each.audio).name, Path(each.audio).stem, each.audio]
            each.reference = next((texts[key] for key in keys if key in texts), each.reference)
        if not any(each.reference for each in found):
            raise SbkitError(f"{references} has none of the recordings",
                             hint="it must name them by their ids or file names")
    return found


def _named(name: str, schemes: tuple[str, ...]) -> Iterator[Recording]:
    if name == STDIN:
        audio = standard_input("audio", "cat clip.mp3 | sbkit ... -")
        # Saved to a file, because decoders seek in it and it may not fit in memory.
        handle, saved = tempfile.mkstemp(prefix="sbkit-stdin-")
        atexit.register(Path(saved).unlink, missing_ok=True)
        with disk.disk_errors_as_user_error(saved), open(handle, "wb") as copy:
            shutil.copyfileobj(audio.buffer, copy, 1 << 20)
        yield Recording(saved, "stdin", called="standard input")
        return
    path, remote = Path(name), Remote(schemes)
    if path.is_dir():
        for file in sorted(each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES and each.is_file()):
            # Decoded without errors: invalid UTF-8 could not be written into a transcript.
            yield Recording(str(file), os.fsencode(file.relative_to(path).with_suffix("")).decode("utf-8", "replace"))
    elif path.suffix.lower() in (".csv", ".tsv") and path.is_file():
        from sbkit.data.manifest import Manifest

        for row in Manifest.read(path):
            # Relative to the list's folder, as in training, unless only the working directory has it.
            beside = os.path.join(path.parent, row.wav)  # an absolute one stays
            wav = row.wav if "://" in row.wav or (os.path.exists(row.wav) and not os.path.exists(beside)) else beside
            yield Recording(wav, row.id, row.start, row.duration, row.text.strip() or None, remote=remote)
    elif path.suffix.lower() in (".json", ".jsonl", ".ndjson") and path.is_file():
        from sbkit.data.manifest import MAX_SECONDS
        from sbkit.data.sources.json_lines import JsonLines

        source = JsonLines({"train": path}, {})
        source.needs_text = False
        rows = source.read("train", show_progress=False)
        for place, problem in rows.malformed:
            raise SbkitError(f"{path.parent / place}: {problem}")
        for i in range(len(rows)):
            length = float(rows.durations[i])
            yield Recording(rows.wavs[i], rows.ids[i], float(rows.starts[i]),
                            length if 0 <= length <= MAX_SECONDS else None, rows.texts[i].strip() or None,
                            remote=remote)
    elif not path.exists() and "?offset=" not in name and "://" not in name:
        raise SbkitError(f"{name}: no such file")
    else:
        yield Recording(name, os.fsencode(path.stem).decode("utf-8", "replace"),
                        remote=Remote(tuple(filter(None, [scheme_of(name)]))))


def lengths(recordings: Sequence[Recording], rate: int) -> list[float]:
    """The seconds of recordings by their headers; 0 for one that can't be read, which is reported later."""
    found = []
    for each in recordings:
        try:
            found.append(each.seconds(rate))
        except SbkitError:
            found.append(0.0)
    return found


def _texts(path: Path) -> dict[str, str]:
    """The texts of a list by the names of its recordings: a CSV, a TSV with a header, or lines ``name<TAB>text``."""
    from sbkit.data.delimited import header, read_delimited
    from sbkit.data.sources.base import ALIASES

    if path.suffix.lower() == ".csv":
        return _columns(read_delimited(path))
    columns: list[str] = []
    with contextlib.suppress(SbkitError):  # two equal fields, which no header has
        columns = header(path, delimiter="\t", quoted=False)
    if {*columns} & {*ALIASES["text"]}:
        return _columns(read_delimited(path, delimiter="\t", quoted=False))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SbkitError(f"{path} cannot be read: {error}") from error
    texts = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            name, tab, text = line.partition("\t")
            if not tab:
                raise SbkitError(f"{path}:{number}: expected a name, a tab and a text")
            texts[name.strip()] = text.strip()
    return texts


def _columns(read: Delimited) -> dict[str, str]:
    from sbkit.data.sources.base import ALIASES

    hint = "references need the recordings' ids or files, and their texts"
    texts = read.need(*ALIASES["text"], hint=hint)
    named = [column for role in ("id", "audio") if (column := read.find(*ALIASES[role])) is not None]
    if read.malformed:
        line, what = read.malformed[0]
        raise SbkitError(f"{read.path}, line {line}: {what}", hint="every row needs as many fields as the header")
    rows = [(name, text.strip()) for column in named or [read.need(*ALIASES["audio"], hint=hint)]
            for name, text in zip(column.to_pylist(), texts.to_pylist(), strict=True)]
    said: dict[str, set[str]] = {}
    for name, text in rows:
        said.setdefault(os.path.basename(name), set()).add(text)
    return {name: min(each) for name, each in said.items() if len(each) == 1} | dict(rows)


def output_path(folder: Path, recording: Recording, suffix: str) -> Path:
    """The path of a recording's output: always in ``folder``, whatever the id contains."""
    parts = [part for part in recording.id.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return folder.joinpath(*(parts or ["_"])).with_name(f"{parts[-1] if parts else '_'}.{suffix}")


def check_output_paths(folder: Path, recordings: Sequence[Recording]) -> None:
    """Raise if two recordings would have the same output path, because their ids differ only in parts that it drops."""
    first: dict[Path, Recording] = {}
    for each in recordings:
        other = first.setdefault(output_path(folder, each, "txt"), each)
        if other is not each:
            raise SbkitError(f"{other.id!r} and {each.id!r} would be written to the same file",
                             hint="change one of the ids")
