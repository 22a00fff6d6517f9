"""A start that is refused leaves a run's folder as it was: with the recipe and the corpus that it was trained on."""

from __future__ import annotations

import contextlib
import os
import shutil
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
        changed = {key: (before.get(key, "nothing"), now.get(key, "nothing")) for key in {**before, **now}
                   if before.get(key) != now.get(key)}
        named = {change for key, change in changed.items() if "." not in key}  # others only refer to these
        return [f"{key} {one} -> {other}" for key, (one, other) in changed.items()
                if "." not in key or (one, other) not in named]

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


def _values(tree: Any, key: str = "") -> dict[str, str]:
    """Each value of a recipe by its dotted key."""
    if not isinstance(tree, (dict, list)):
        return {key: "null" if tree is None else str(getattr(tree, "value", tree))}
    found: dict[str, str] = {}
    for at, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        found |= _values(part, f"{key}.{at}" if key else str(at))
    return found


def _link(source: str, target: str) -> None:
    """Manifests are replaced and never written into, so that a second name keeps them; they may be large."""
    try:
        os.link(source, target)
    except OSError:  # a file system without
        shutil.copy2(source, target)
