"""Tells from a path or name what kind of corpus it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sbkit.data.sources.base import Source
from sbkit.data.sources.common_voice import CommonVoice, is_language_folder, language_folders
from sbkit.errors import SbkitError


def open_source(source: str | Path, *, language: str | None, columns: Mapping[str, str], cache: Path,
                data_root: str | Path | None = None, show_progress: bool = True) -> Source:
    """Open a corpus of any kind; ``cache`` is where audio goes that has to be unpacked."""
    path = Path(source)
    if path.is_dir() and (is_language_folder(path) or language_folders(path)):
        return CommonVoice(path, language)
    raise SbkitError(
        f"{source} is no corpus that sbkit knows",
        hint="expected a Common Voice folder (clips/ and train.tsv)")
