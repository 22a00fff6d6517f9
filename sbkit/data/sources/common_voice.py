"""Common Voice releases from version 5 on: a folder with ``clips/`` and one TSV per split."""

from __future__ import annotations

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.data.delimited import header, read_delimited
from sbkit.data.language_code import may_be_same
from sbkit.data.manifest import Column, join, to_seconds
from sbkit.data.sources.base import META_ALIASES, Rows, Source, stamp
from sbkit.errors import SbkitError

logger = logging.getLogger(__name__)

_HINT = "is it a Common Voice release? Its TSVs have the columns client_id, path, sentence, ..."
#: TSVs of a release that don't list clips with sentences.
_OTHER_LISTS = {"clip_durations", "reported", "unvalidated_sentences", "validated_sentences"}
_COLUMNS = {"path", "sentence", "client_id", *(name for names in META_ALIASES.values() for name in names)}
_SUFFIX = r"\.[A-Za-z0-9]+$"
# A median "duration" above this is in milliseconds.
_LONGEST_SECONDS = 300.0


class CommonVoice(Source):
    """One language of a release.

    path : the language's folder (the one with ``clips/``), or a folder of such folders
    language : chooses one of several language folders
    """

    kind = "Common Voice"
    recorded = True
    paths_start = "unpack its recordings into clips/, beside the lists"

    def __init__(self, path: Path, language: str | None = None):
        chosen = [path]
        there = [path]
        if not is_language_folder(path):
            there = language_folders(path)
            chosen = [folder for folder in there if language in (None, folder.name)]
        if len(chosen) != 1:
            names = ", ".join(folder.name for folder in there) or "none"
            wanted = f" and has none for the language {language!r}" if language else ""
            raise SbkitError(
                f"{path} is not a Common Voice language folder{wanted} (languages there: {names})",
                hint="expected a folder with clips/ and train.tsv, or set the language")
        self.folder = chosen[0]
        self.language = language
        self._reported = False  # that the recordings have another language
        self.where = str(self.folder)
        self.clips = self.folder / "clips"

    def names(self) -> list[str]:
        return sorted(file.stem for file in self.folder.glob("*.tsv") if file.stem not in _OTHER_LISTS)

    def fingerprint(self) -> list[Any]:
        return [self.kind, *map(stamp, [*sorted(self.folder.glob("*.tsv")), self.clips])]

    def files_of(self, name: str) -> list[Path]:
        durations = self.folder / "clip_durations.tsv"
        return [self.folder / f"{name}.tsv", *([durations] if durations.is_file() else [])]

    def header(self, name: str) -> list[str]:
        return header(self.folder / f"{name}.tsv", delimiter="\t", quoted=False)

    def read(self, name: str, show_progress: bool = True) -> Rows:
        path = self.folder / f"{name}.tsv"
        further = [role for role in self.wanted if role not in (*META_ALIASES, "speaker", "text", "id")]
        tsv = read_delimited(path, delimiter="\t", quoted=False, only={*_COLUMNS, *further})
        clips, sentences = (Column(tsv.need(column, hint=_HINT)) for column in ("path", "sentence"))
        clip_names = _file_names(clips.arrow)
        meta = {ours: Column(column) for ours, theirs in META_ALIASES.items()
                if (column := tsv.find(*theirs)) is not None}
        meta.update({role: Column(tsv.need(role)) for role in further})
        locales = meta.get("language")
        found = locales[0] if locales else None
        if not self._reported and not may_be_same(found, self.language):
            self._reported = True
            logger.warning("%s holds %s, but the language is set to %s: the text rules may not fit",
                           self.folder, found, self.language)
        seconds = np.full(len(clip_names), np.nan)  # of clips that clip_durations.tsv doesn't list
        if self._listed is not None:
            names, listed = self._listed
            at = pc.index_in(clip_names, names)
            known = pc.is_valid(at).to_numpy(zero_copy_only=False)
            seconds[known] = listed[pc.fill_null(at, 0).to_numpy()[known]]
        return Rows(
            str(path), pc.replace_substring_regex(clip_names, _SUFFIX, ""),
            join(f"{os.path.abspath(self.clips)}/", clip_names), sentences, tsv.find("client_id"),
            seconds, meta=meta,
            malformed=[(f"{path.name} line {line}", what) for line, what in tsv.malformed],
        )

    @cached_property
    def _listed(self) -> tuple[pa.Array, np.ndarray] | None:
        """File names and seconds of all clips, in releases since about version 14."""
        path = self.folder / "clip_durations.tsv"
        if not path.is_file():
            return None
        tsv = read_delimited(path, delimiter="\t", quoted=False)
        names = _file_names(Column(tsv.need("clip", "path")).arrow)
        title = next((title for title in tsv.columns if title.lower().startswith("duration")), "duration[ms]")
        tsv.need(title)
        seconds = to_seconds(path, title, tsv.columns[title], unknown=np.nan)
        if "ms" in title.lower() or (np.isfinite(seconds).any() and np.nanmedian(seconds) > _LONGEST_SECONDS):
            seconds = seconds / 1000
        seconds[seconds == 0] = np.nan  # 0 means not measured
        return names, seconds


def _file_names(paths: pa.Array) -> pa.Array:
    """Return plain file names: ``a.mp3`` for ``clips/a.mp3`` and for ``a``, which some copies of releases have."""
    if pc.any(pc.match_substring(paths, "/")).as_py():
        paths = pc.replace_substring_regex(paths, r"^.*/", "")
    return pc.if_else(pc.match_substring_regex(paths, _SUFFIX), paths, join(paths, ".mp3"))


def is_language_folder(path: Path) -> bool:
    return (path / "clips").is_dir() and next(path.glob("*.tsv"), None) is not None


def language_folders(path: Path) -> list[Path]:
    """The language folders in a folder, or else one level below (``cv-corpus-21.0-2025-03-14/fr``)."""
    inside = _folders(path)
    found = [child for child in inside if is_language_folder(child)]
    return found or [child for top in inside for child in _folders(top) if is_language_folder(child)]


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []
