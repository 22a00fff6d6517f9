"""A start that is refused leaves a run's folder as it was: with the recipe and the corpus that it was trained on."""

from __future__ import annotations

import logging
import os
import shutil
from collections import deque
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.recipe import load
from sbkit.runs.layout import BEFORE_START, MANIFESTS, RECIPE, TESTED
from sbkit.system import disk

logger = logging.getLogger(__name__)

_FILES = (RECIPE, "run.py", TESTED)
#: What lies in ``BEFORE_START`` is whole: it gets and loses that name in one step, and has these before and after.
_PART, _GONE = f"{BEFORE_START}.part", f"{BEFORE_START}.gone"


class StartGuard:
    """Within it, what a start writes over is kept aside, and put back by an error before the run ``begins``.

    A start that is killed leaves it aside: the next one puts it back first.

    folder : of the run
    here : whether this process is the one that writes there
    """

    def __init__(self, folder: Path, here: bool = True):
        self.folder, self.aside = folder, folder / BEFORE_START
        self._here = here

    def begins(self) -> None:
        """From here on what was written stands."""
        if self._here:
            _drop(self.folder)
            self._here = False

    def changes(self) -> list[str]:
        """The values of the recipe that are others than the run had before, before it begins."""
        if not self._here:
            return []
        try:
            before, now = (_values(load.read_plain(folder / RECIPE)) for folder in (self.aside, self.folder))
        except SbkitError:  # not kept, or not the run's
            return []
        changed: dict[tuple[str, str], list[str]] = {}
        for key in before | now:
            change = before.get(key, "nothing"), now.get(key, "nothing")
            if change[0] != change[1]:
                changed.setdefault(change, []).append(key)
        return [f"{', '.join(keys)}: {one} -> {other}" for (one, other), keys in changed.items()]

    def __enter__(self) -> StartGuard:
        if self._here:
            put_back(self.folder)
            self._here = (self.folder / RECIPE).is_file()
        if self._here:
            try:
                with disk.told(self.folder):
                    self._keep()
            except OSError as error:
                raise SbkitError(f"cannot write into {self.folder}: {error.strerror}",
                                 hint="choose another place with --output_folder") from error
        return self

    def _keep(self) -> None:
        part = self.folder / _PART
        part.mkdir()
        for name in _FILES:
            if (self.folder / name).is_file():
                shutil.copy2(self.folder / name, part / name)
        disk.sync_files(part)
        if (self.folder / MANIFESTS).is_dir():
            (part / MANIFESTS).mkdir()
            for path in _manifests(self.folder):
                _link(path, part / MANIFESTS / path.name)
            disk.sync_folder(part / MANIFESTS)
        os.rename(part, self.aside)
        disk.sync_folder(self.folder)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and self._here:
            put_back(self.folder)
        self.begins()


def put_back(folder: Path) -> None:
    """Make a run's folder what it was before a start that was refused or killed, and tidy up after that.

    Manifests belong together: where the run had some, those that it hadn't go. Killed meanwhile, it is done again.
    """
    aside = folder / BEFORE_START
    if aside.is_dir():
        kept = [path.relative_to(aside) for path in sorted(aside.rglob("*")) if path.is_file()]
        if any(path.parent.name for path in kept):
            for path in _manifests(folder):
                if path.relative_to(folder) not in kept:
                    path.unlink()
        for path in kept:
            (folder / path).parent.mkdir(exist_ok=True)
            between = (folder / path).with_name(f".{path.name}.back")
            between.unlink(missing_ok=True)
            _link(aside / path, between)
            os.replace(between, folder / path)
            between.unlink(missing_ok=True)  # still there where both were one file already
        logger.info("%s is again as it was before a start that came to nothing", folder)
    _drop(folder)


def _drop(folder: Path) -> None:
    """Forget what was kept aside, at once and not file by file."""
    aside, gone = folder / BEFORE_START, folder / _GONE
    shutil.rmtree(gone, ignore_errors=True)
    if aside.is_dir():
        os.rename(aside, gone)
    for path in (gone, folder / _PART):
        shutil.rmtree(path, ignore_errors=True)


def _manifests(folder: Path) -> list[Path]:
    """What preparation writes for a run to read; not what it unpacks, nor its notes to itself."""
    there = folder / MANIFESTS
    return [path for path in there.iterdir() if path.is_file() and not path.name.startswith(".")] \
        if there.is_dir() else []


def _values(recipe: dict[str, Any]) -> dict[str, str]:
    """Each tag and each value of a recipe by its dotted key; what many refer to by the shortest one alone."""
    found: dict[str, str] = {}
    waiting, seen = deque(load.flatten(recipe).items()), set()
    while waiting:
        key, part = waiting.popleft()
        tag = getattr(getattr(part, "tag", None), "value", None) or ""
        if not isinstance(part, (dict, list)):
            value = "null" if part is None else str(getattr(part, "value", part))
            found[key] = f"{tag} {value}".strip()
        elif id(part) not in seen:
            seen.add(id(part))
            if tag:
                found[key] = str(tag)
            inside = part.items() if isinstance(part, dict) else enumerate(part)
            waiting.extend((f"{key}.{at}", one) for at, one in inside)
    return found


def _link(source: Path, target: Path) -> None:
    """Manifests are replaced and never written into, so that a second name keeps them; they may be large."""
    try:
        os.link(source, target)
    except OSError:  # a file system without
        shutil.copy2(source, target)
