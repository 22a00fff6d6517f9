"""The starter folder that ``sbkit new`` writes: a task's main recipe, recipes based on it, ``train.py`` and a README.

``sbkit/starter`` has all files that may go into one, with the same relative paths. Its README names ctc.yaml where the
task's recipe is meant. In a checkout the others are links to files at its root, in an installed package they are the
files themselves.
"""

from __future__ import annotations

from pathlib import Path

import sbkit
from sbkit.errors import SbkitError
from sbkit.recipe.files import chain
from sbkit.recipe.report import did_you_mean
from sbkit.recipe.source import Findings

HOME = Path(sbkit.__file__).parent / "starter"
RECIPES = "hparams"
OWN = "mine"
"""The name of the template for a user's own task; it is in a separate folder."""
README = Path("README.md")


def tasks() -> list[str]:
    """The tasks that have a starter."""
    return sorted([OWN, *(path.stem for path in (HOME / RECIPES).glob("*.yaml"))])


def files(task: str) -> dict[Path, Path]:
    """The files of a task's starter, by their paths in the new folder."""
    if task not in tasks():
        near = did_you_mean(task, tasks())
        raise SbkitError("bad-value", f"there is no task {task!r}", key="task", value=task,
                         hint=(f"did you mean {near}? " if near else "") + f"tasks are {', '.join(tasks())}")
    if task == OWN:
        own = HOME / "own"
        places = [path for path in sorted(own.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
        return {path.relative_to(own): path for path in places}
    flagship = HOME / RECIPES / f"{task}.yaml"
    based = [path.relative_to(HOME) for path in sorted((HOME / "recipes").rglob(f"{RECIPES}/*.yaml"))
             if any(below.samefile(flagship) for below, _ in chain(path, Findings()))]
    read = [path.relative_to(HOME) for path, _ in chain(flagship, Findings())]
    return {place: HOME / place for place in (README, Path("train.py"), *read, *based)}


def write(folder: Path, task: str) -> list[Path]:
    """Write a starter and return the paths of its files; existing files are never overwritten."""
    sources = files(task)
    there = [str(place) for place in sources if (folder / place).exists() or (folder / place).is_symlink()]
    if there:
        raise SbkitError("output-exists", f"{folder} has {', '.join(there)} already", file=folder / there[0],
                         hint="nothing was written; name another folder")
    for place, source in sources.items():
        to, text = folder / place, source.read_text(encoding="utf-8")
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(text.replace("ctc.yaml", f"{task}.yaml") if place == README else text, encoding="utf-8")
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise SbkitError("not-writable", f"cannot write {to}: {error.strerror}", file=to,
                             hint="name another folder") from error
    return list(sources)
