"""Loads a recipe: builds the objects of a file in HyperPyYAML's language with overrides, or raises a readable error.

A recipe may be based on another one and contain only what differs:

    recipe: !include:../ctc.yaml
        d_model: 512

HyperPyYAML puts the included tree under the key ``recipe``. Here its keys become keys of the recipe itself, and
overrides are applied in the file they belong to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from sbkit.errors import SbkitError, summary
from sbkit.recipe import build, files, names, writing
from sbkit.recipe.files import Files, written
from sbkit.recipe.keys import COMPLETE, SCRIPT, Problem, Task, TaskClass, TaskKeys, is_task
from sbkit.recipe.overrides import with_full_keys
from sbkit.recipe.resolve import flatten, resolve
from sbkit.recipe.source import Findings, Node

if TYPE_CHECKING:
    import numpy as np
    from speechbrain.utils.run_opts import RunOptions

#: Transcribes waveforms [S] at the recipe's sample rate.
Transcribe: TypeAlias = "Callable[[Sequence[np.ndarray]], list[str]]"

#: Errors of a check about keys that may be misspelt or without effect; such recipes can still be loaded.
_LOADED = ("shadowed", "unknown-override", "null-in-text")


class Recipe(NamedTuple):
    """The objects of a recipe by key, and the keys that its task reads, the class under ``brain``."""

    hparams: dict[str, Any]
    keys: TaskKeys
    """An instance of the task's ``Keys`` (see ``sbkit.tasks.task.Task``)."""
    tree: Node
    """The resolved tree that the objects were built from."""

    @property
    def task(self) -> TaskClass:
        """The class under ``brain``, which trains."""
        return self.keys.brain

    def brain(self, run_opts: RunOptions | None = None, *, transcribe: Transcribe | None = None,
              **instead: Any) -> Task:
        """Build the Brain.

        transcribe : a recogniser for the tests of a task that generates speech; None: there is none
        instead : values that replace those of keys
        """
        hparams = {**self.hparams, **instead}
        # Only such a task has the argument.
        of_tests: dict[str, Any] = {} if transcribe is None else {"transcribe": transcribe}
        return self.task(modules=hparams["modules"], opt_class=hparams.get("opt_class"), hparams=hparams,
                         run_opts=run_opts, checkpointer=hparams.get("checkpointer"), **of_tests)


def check_overrides(path: Path, overrides: Mapping[str, Any]) -> None:
    """Refuse overrides of keys that no file of the recipe has and the task doesn't declare."""
    recipe_files = chain(path)
    findings = Findings()
    names.check_overrides(recipe_files, with_full_keys(overrides, files.keys(recipe_files)), findings)
    if findings:
        raise findings.as_error()


def chain(path: Path) -> Files:
    """The files of a recipe, each with its unresolved tree; raises if one can't be read."""
    findings = Findings()
    recipe_files = files.chain(path, findings)
    if findings:
        raise findings.as_error()
    return recipe_files


def tree(path: Path) -> Node:
    """The unresolved tree of a recipe, with all keys at one level; nothing is imported or built."""
    return flatten(chain(path)[0][1])


def merged(path: Path, overrides: Mapping[str, Any]) -> str:
    """The text of an equivalent recipe of one file: overrides applied, references and includes resolved."""
    return writing.text(resolved(path, overrides))


def resolved(path: Path, overrides: Mapping[str, Any]) -> Node:
    """The tree of that recipe, with all keys at one level."""
    findings = Findings()
    root, _ = resolve(path, overrides, findings, call=True)
    findings[:] = [finding for finding in findings if finding.code not in _LOADED]
    if root is None or findings:
        raise findings.as_error()
    return flatten(root)


def load(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Build the objects of a recipe, whatever its task needs, for tests and tools; all errors name its file."""
    check_overrides(path, overrides)
    return _build(path, overrides, resolved(path, overrides))


def open_recipe(path: Path, overrides: Mapping[str, Any]) -> Recipe:
    """Resolve a recipe and build its objects; refuse it if a key of its task is missing or wrong."""
    check_overrides(path, overrides)
    return build_recipe(path, overrides, resolved(path, overrides))


def build_recipe(path: Path, overrides: Mapping[str, Any], tree: Node) -> Recipe:
    """Build all objects of a resolved recipe; refuse it if a key of its task is missing or wrong.

    path, overrides : what it was resolved from, for error messages
    """
    hparams = _build(path, overrides, tree)
    return Recipe(hparams, read_keys(hparams, path), tree)


def _build(path: Path, overrides: Mapping[str, Any], tree: Node) -> dict[str, Any]:
    with building(path, overrides):
        return build.objects(tree)


@contextlib.contextmanager
def building(path: Path, overrides: Mapping[str, Any]) -> Iterator[None]:
    """Context that builds objects of a recipe: an error names its file, and the mistakes that are found in it."""
    try:
        yield
    except SbkitError:
        raise
    except OSError as error:
        code = "no-such-path" if isinstance(error, FileNotFoundError) else "not-writable"
        raise SbkitError(code, f"cannot use {error.filename or path}: {error.strerror}", file=error.filename or path,
                         hint="choose another place with --output_folder") from error
    except Exception as error:
        failure = f"{path} cannot be loaded: {summary(error)}"
        found = mistakes(path, overrides)
        if not found.has_errors:
            raise SbkitError("not-built", failure, file=path) from error
        cause = found.as_error()
        raise SbkitError(cause.code, f"{cause.message}; {failure}", hint=cause.hint, file=cause.file, line=cause.line,
                         key=cause.key) from error


def mistakes(path: Path, overrides: Mapping[str, Any]) -> Findings:
    """The mistakes in a recipe and its overrides, each with its place, for the error about one that failed."""
    from sbkit.recipe.reading import read  # imports torch

    findings = Findings()
    read(path, overrides, findings)
    return Findings(finding for finding in findings if finding.code not in _LOADED)


def read_keys(hparams: dict[str, Any], path: Path) -> TaskKeys:
    """The keys of the task; an error if one is missing or wrong.

    path : the recipe's file, for error messages
    """
    declared = declaring_class(hparams, hparams, path)
    problems = [*declared.wrong(hparams), *declared.null(hparams), *declared.misfits(hparams)]
    refuse_problems(problems or list(declared.read(hparams).clashes()), path)
    return declared.read(hparams)


def declaring_class(hparams: Mapping[str, Any], there: Container[str], path: Path) -> type[TaskKeys]:
    """The class that declares the keys of the task; an error if the recipe has no task, or lacks a key that it needs.

    there : the keys that the recipe has
    """
    task = hparams.get("brain")
    if task is None:
        raise SbkitError("missing-key", f"{path} lacks brain", file=path, key="brain",
                         hint=f"{SCRIPT}; otherwise, {COMPLETE}")
    declared = getattr(task, "Keys", None)
    if declared is None or not is_task(task):
        raise SbkitError("not-a-task", file=path, key="brain",
                         message=f"{path}: brain is {getattr(task, '__name__', task)!s}, which is not a task of sbkit",
                         hint="derive it from sbkit.tasks.task.Task; docs/how-to/extend.md shows how")
    missing = [key for key in declared.needed() if key not in there]
    if missing:
        raise SbkitError("missing-key", f"{path} lacks {', '.join(missing)}", hint=COMPLETE, file=path, key=missing[0])
    return declared


def refuse_problems(problems: Sequence[Problem], path: Path) -> None:
    """Raise one error about all problems, if there are any, with the file of each key; its code is the first one's."""
    if not problems:
        return
    recipe_files = chain(path)
    first = problems[0]
    raise SbkitError(first.code,
                     "; ".join(f"{written(problem.key, recipe_files)}: {problem.text}" for problem in problems),
                     hint="; ".join(dict.fromkeys(problem.hint for problem in problems)), file=path, key=first.key)
