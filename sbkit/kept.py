"""A start that is refused leaves a run's folder as it was: with the recipe and the corpus that it was trained on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sbkit.score.report_data import RECIPE
from sbkit.tested import NAME as TESTED
from sbkit.train.checkpoint_files import CheckpointError

_FILES, _FOLDER = (RECIPE, "run.py", TESTED), "manifests"
_ASIDE = ".before-this-start"


class Kept:
    """Within it, what a start writes over is kept aside, and put back if the run does not begin.

    ``begins`` is called when it does. A checkpoint that turns out to be of another model still puts all back.

    folder : of the run
    here : whether this process is the one that writes there
    """

    def __init__(self, folder: Path, here: bool = True):
        self.folder, self.aside = folder, folder / _ASIDE
        self._here = here and (folder / RECIPE).is_file()
        self._begun = False

    def begins(self) -> None:
        self._begun = True

    def __enter__(self) -> Kept:
        if self._here:
            shutil.rmtree(self.aside, ignore_errors=True)  # of a start that was killed
            self.aside.mkdir()
            for name in _FILES:
                if (self.folder / name).is_file():
                    shutil.copy2(self.folder / name, self.aside / name)
            if (self.folder / _FOLDER).is_dir():
                shutil.copytree(self.folder / _FOLDER, self.aside / _FOLDER, copy_function=_link)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if not self._here:
            return
        refused = kind is not None and (not self._begun or issubclass(kind, CheckpointError))
        for path in sorted(self.aside.rglob("*")) if refused else ():
            if path.is_file():
                os.replace(path, self.folder / path.relative_to(self.aside))
        shutil.rmtree(self.aside, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Manifests are replaced and never written into, so that a second name keeps them; they may be large."""
    try:
        os.link(source, target)
    except OSError:  # a file system without
        shutil.copy2(source, target)
