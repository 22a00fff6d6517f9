"""A start that is refused leaves a run's folder as it was: with the recipe and the corpus that it was trained on."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.recipe import load
from sbkit.score.report_data import RECIPE
from sbkit.tested import NAME as TESTED

_FILES, _FOLDER = (RECIPE, "run.py", TESTED), "manifests"
_ASIDE = ".before-this-start"


class Kept:
    """Within it, what a start writes over is kept aside, and put back by an error before the run ``begins``.

    folder : of the run
    here : whether this process is the one that writes there
    """

    def __init__(self, folder: Path, here: bool = True):
        self.folder, self.aside = folder, folder / _ASIDE
        self._here = here and (folder / RECIPE).is_file()

    def begins(self) -> None:
        """From here on what was written stands."""
        if self._here:
            shutil.rmtree(self.aside, ignore_errors=True)
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

    def __enter__(self) -> Kept:
        if self._here:
            shutil.rmtree(self.aside, ignore_errors=True)  # of a start that was killed
            with contextlib.suppress(OSError):  # a folder that can't be written: the start says so
                self._keep()
        return self

    def _keep(self) -> None:
        self.aside.mkdir()
        for name in _FILES:
            if (self.folder / name).is_file():
                shutil.copy2(self.folder / name, self.aside / name)
        if (self.folder / _FOLDER).is_dir():
            shutil.copytree(self.folder / _FOLDER, self.aside / _FOLDER, copy_function=_link)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and self._here:
            for path in filter(Path.is_file, [*self.aside.rglob("*")]):
                os.replace(path, self.folder / path.relative_to(self.aside))
        self.begins()


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


def _link(source: str, target: str) -> None:
    """Manifests are replaced and never written into, so that a second name keeps them; they may be large."""
    try:
        os.link(source, target)
    except OSError:  # a file system without
        shutil.copy2(source, target)
