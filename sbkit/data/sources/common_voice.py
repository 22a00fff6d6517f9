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
        folders = [path]
        chosen = [path]
        if not is_language_folder(path):
            folders = language_folders(path)
            chosen = [folder for folder in folders if language in (None, folder.name)]
        if len(chosen) != 1:
            if not folders:
                raise SbkitError("unknown-corpus-format", f"{path} is not a Common Voice release",
                                 hint="expected a folder with clips/ and train.tsv", file=path)
            what = f"no language {language!r}" if language else "several languages, and none is chosen"
            names = ", ".join(folder.name for folder in folders)
            raise SbkitError("ambiguous-corpus", f"{path} has {what} (its languages: {names})",
                             hint="set the language to one of these", file=path, key="language", value=language)
        self.folder = chosen[0]
        self.language = language
        self._has_warned = False  # that the recordings have another language
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
        clips = Column(tsv.need("path", hint=_HINT))
        sentences = Column(tsv.need("sentence", hint=_HINT))
        clip_names = _file_names(clips.arrow)
        meta = {}
        for ours, theirs in META_ALIASES.items():
            column = tsv.find(*theirs)
            if column is not None:
                meta[ours] = Column(column)
        meta.update({role: Column(tsv.need(role)) for role in further})
        locales = meta.get("language")
        locale = locales[0] if locales else None
        if not self._has_warned and not may_be_same(locale, self.language):
            self._has_warned = True
            logger.warning("%s holds %s, but the language is set to %s: the text rules may not fit",
                           self.folder, locale, self.language)
        seconds = np.full(len(clip_names), np.nan)  # of clips that clip_durations.tsv doesn't list
        if self._listed_seconds is not None:
            listed_names, listed_seconds = self._listed_seconds
            places = pc.index_in(clip_names, listed_names)
            is_listed = pc.is_valid(places).to_numpy(zero_copy_only=False)
            seconds[is_listed] = listed_seconds[pc.fill_null(places, 0).to_numpy()[is_listed]]
        return Rows(
            str(path), pc.replace_substring_regex(clip_names, _SUFFIX, ""),
            join(f"{os.path.abspath(self.clips)}/", clip_names), sentences, tsv.find("client_id"),
            seconds, meta=meta,
            malformed=[(f"{path.name} line {line}", what) for line, what in tsv.malformed],
        )

    @cached_property
    def _listed_seconds(self) -> tuple[pa.Array, np.ndarray] | None:
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
    children = _folders(path)
    languages = [child for child in children if is_language_folder(child)]
    return languages or [folder for child in children for folder in _folders(child) if is_language_folder(folder)]


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []
