"""Guard that restores a run's folder, with its recipe and manifests, if a start is refused."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from sbkit.errors import SbkitError
from sbkit.recipe import load, writing
from sbkit.recipe.source import Node
from sbkit.runs import earlier_recipes
from sbkit.score.run_files import BEFORE_START, ENVIRONMENT, HELD, MANIFESTS, RECIPE, TESTED
from sbkit.system import disk, processes

logger = logging.getLogger(__name__)

_FILES = (RECIPE, "preparation.py", ENVIRONMENT, TESTED)
#: ``BEFORE_START`` is always complete: it is renamed atomically, from and to these names.
_PART = f"{BEFORE_START}.part"
_GONE = f"{BEFORE_START}.gone"
#: The value of a key that one of two recipes lacks, among their differences.
NO_KEY = "nothing"
_MAX_CHANGES = 10  # of a recipe, in a message


class StartGuard:
    """Context that backs up what a start overwrites, and restores it on an error before the run ``begins``.

    A start that is killed leaves its backup: the next start restores it first.

    folder : the run's folder
    here : whether this process writes there
    restores : whether the backup is restored even without an error
    """

    restores = False

    def __init__(self, folder: Path, here: bool = True):
        self.folder = folder
        self.backup = folder / BEFORE_START
        self._here = here

    def begins(self) -> None:
        """Keep what was written, and drop the backup."""
        if self._here:
            _drop(self.folder)
            self._here = False

    def changed(self) -> dict[str, tuple[str, str]]:
        """Recipe values that differ from the run's previous start, before and now; empty once it ``begins``.

        Paths in an output folder that has moved don't differ.
        """
        if not self._here:
            return {}
        try:
            return _differing(self.backup / RECIPE, self.folder / RECIPE)
        except SbkitError:  # there is no backup, or it is not readable
            return {}

    def changes(self) -> list[str]:
        """Descriptions of the ``changed`` values; see ``in_words``."""
        return in_words(self.changed())

    def __enter__(self) -> StartGuard:
        if self._here:
            restore_previous(self.folder)
            self._here = (self.folder / RECIPE).is_file()
        if self._here:
            with disk.writing_into(self.folder, "--output_folder"):
                self._back_up()
        return self

    def _back_up(self) -> None:
        part = self.folder / _PART
        part.mkdir()
        for name in _FILES:
            if (self.folder / name).is_file():
                shutil.copy2(self.folder / name, part / name)
        disk.sync_files(part)
        if (self.folder / MANIFESTS).is_dir():
            (part / MANIFESTS).mkdir()
            for path in _manifests(self.folder):
                disk.link_or_copy(path, part / MANIFESTS / path.name)
            disk.sync_folder(part / MANIFESTS)
        os.rename(part, self.backup)
        disk.sync_folder(self.folder)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._here and (self.restores or kind is not None):
            restore_previous(self.folder)
        self.begins()


def in_words(changed: Mapping[str, tuple[str, str]]) -> list[str]:
    """Short descriptions of changed values of a recipe, at most ten; keys with the same change share one."""
    keys: dict[tuple[str, str], list[str]] = {}
    for key, change in changed.items():
        keys.setdefault(change, []).append(key)
    lines = [f"{_short(', '.join(keys_of_change))}: {_short(before)} -> {_short(now)}"
             for (before, now), keys_of_change in keys.items()]
    more = len(lines) - _MAX_CHANGES
    return lines if more <= 0 else [*lines[:_MAX_CHANGES], f"and {more} more"]


def changed_since(folder: Path, tree: Node) -> dict[str, tuple[str, str]]:
    """Values of a resolved recipe that differ from those of the run in ``folder``, before and now."""
    with tempfile.TemporaryDirectory() as temporary:  # both are read back, so that the same number has the same text
        path = Path(temporary) / RECIPE
        path.write_text(writing.text(tree), encoding="utf-8")
        return _differing(folder / RECIPE, path)


def _differing(before: Path, now: Path) -> dict[str, tuple[str, str]]:
    """Values of two recipes that differ; paths in an output folder that has moved don't."""
    old_values, new_values = (earlier_recipes.rename(load.tree(path)).texts() for path in (before, now))
    old_folder = old_values.get("output_folder", NO_KEY)
    new_folder = new_values.get("output_folder", NO_KEY)
    changes = {}
    for key in old_values | new_values:
        old = old_values.get(key, NO_KEY)
        new = new_values.get(key, NO_KEY)
        was_in_folder = f"{old}/".startswith(f"{old_folder}/")
        moved_along = was_in_folder and new == new_folder + old.removeprefix(old_folder)
        if new != old and not moved_along:
            changes[key] = (old, new)
    return changes


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


@contextlib.contextmanager
def without_traces(folder: Path) -> Iterator[None]:
    """Context that may make a folder: if it fails, its locks and empty files go again, and with them an empty folder.

    What took work stays for the next try, such as durations that were measured. Nothing goes from an older folder.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        locks = list(folder.glob(HELD.format("*")))
        if new_folders and _is_only_ours(locks):
            for path in [*folder.glob("*/*"), *folder.glob("*"), *new_folders]:  # a folder comes after what is in it
                with contextlib.suppress(OSError):
                    if path.is_dir():
                        path.rmdir()  # refused unless it is empty
                    elif path in locks or (path.name.startswith(".") and not path.stat().st_size):
                        path.unlink()
        raise


def _is_only_ours(locks: list[Path]) -> bool:
    """Whether no other process works in a folder with these locks."""
    if not locks:
        return True
    holder = {}
    with contextlib.suppress(OSError, ValueError):
        holder = dict(json.loads(locks[0].read_text(encoding="utf-8")))
    this_process = (os.getpid(), processes.born(os.getpid()))
    return len(locks) == 1 and (holder.get("pid"), holder.get("born")) == this_process


def restore_previous(folder: Path) -> None:
    """Restore a run's folder to what it was before a start that was refused or killed, and drop the backup.

    Manifests belong together: if the run had any, new ones are deleted. If this is killed, the next start repeats it.
    """
    backup = folder / BEFORE_START
    if backup.is_dir():
        names = [path.relative_to(backup) for path in sorted(backup.rglob("*")) if path.is_file()]
        if any(name.parent.name for name in names):  # some are in the folder of manifests
            for path in _manifests(folder):
                if path.relative_to(folder) not in names:
                    path.unlink()
        for name in names:
            target = folder / name
            target.parent.mkdir(exist_ok=True)
            temporary = target.with_name(f".{target.name}.back")
            temporary.unlink(missing_ok=True)
            disk.link_or_copy(backup / name, temporary)
            os.replace(temporary, target)
            temporary.unlink(missing_ok=True)  # still there if both were already the same file
        logger.debug("Restored the recipe and the manifests in %s: the start that wrote others trained nothing", folder)
    _drop(folder)


def _drop(folder: Path) -> None:
    """Delete the backup, atomically rather than file by file."""
    backup, gone = folder / BEFORE_START, folder / _GONE
    shutil.rmtree(gone, ignore_errors=True)
    if backup.is_dir():
        os.rename(backup, gone)
    for path in (gone, folder / _PART):
        shutil.rmtree(path, ignore_errors=True)


def _manifests(folder: Path) -> list[Path]:
    """The files that preparation writes for a run, without unpacked and hidden ones."""
    manifests = folder / MANIFESTS
    if not manifests.is_dir():
        return []
    return [path for path in manifests.iterdir() if path.is_file() and not path.name.startswith(".")]
