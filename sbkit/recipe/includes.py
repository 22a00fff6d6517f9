"""The files of a recipe: which is based on which, and to which of them the key of an override belongs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from sbkit.errors import SbkitError, first_line
from sbkit.recipe.source import BASE, INCLUDE, Node, ShallowComposer

Tree = Any  # what ruamel.yaml makes of a text: mappings, lists and scalars of its own, with tags and lines
Files = list[tuple[Path, Mapping[str, Tree]]]


def read_plain(path: Path) -> dict[str, Tree]:
    """Read a YAML as a tree with its tags, which the caller may change; nothing is imported or built."""
    return _read(path, _parsed)


def _parsed(text: str) -> Tree:
    yaml = YAML()
    yaml.Composer = ShallowComposer
    return yaml.load(text)


_parsed_once = functools.lru_cache(maxsize=16)(_parsed)


def _read(path: Path, parsed: Callable[[str], Tree]) -> dict[str, Tree]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = parsed(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise SbkitError(f"{path}{where}: {error.problem or error.context}") from error
    except UnicodeDecodeError as error:
        raise SbkitError(f"{path} is not UTF-8 text: {error}") from error
    except YAMLError as error:
        raise SbkitError(f"{path} is not valid YAML: {first_line(error)}") from error
    except OSError as error:
        raise SbkitError(f"cannot read {path}: {error.strerror}") from error
    if text.startswith("%"):
        raise SbkitError(f"{path}: a recipe takes no directives", hint="remove the lines down to ---")
    if not isinstance(tree, dict):
        raise SbkitError(f"{path} has no lines with key: value")
    return tree


def tag_of(value: object) -> str:
    """The tag of a value, such as ``!new:torch.nn.Linear`` or ``!ref``; empty for plain data."""
    return value.tag if isinstance(value, Node) else str(getattr(getattr(value, "tag", None), "value", None) or "")


def chain(path: Path) -> Files:
    """The file of a recipe and those it is based on, each with its tree, to be read only: the next call has it too."""
    files: Files = []
    while True:
        if any(path.resolve() == known.resolve() for known, _ in files):
            raise SbkitError(f"{path} includes itself")
        tree = _read(path, _parsed_once)
        files.append((path, tree))
        tag = tag_of(tree.get(BASE))
        if not tag.startswith(INCLUDE):
            return files
        path = path.parent / tag[len(INCLUDE) :]


def levels(files: Files) -> Iterator[tuple[Path, Tree]]:
    """The mappings with keys of a recipe, each with its file; the first one that has a key decides its value.

    Each file has its own keys, and then those under ``recipe``, which override keys of the file it is based on.
    """
    for path, tree in files:
        level: Tree = tree
        while isinstance(level, Mapping):
            yield path, level
            below = level.get(BASE)
            level = below.value if isinstance(below, Node) else below


def keys(files: Files) -> list[Any]:
    """The keys of all files of a recipe, including repeated ones."""
    return [key for _, level in levels(files) for key in level]


def written(key: str, files: Files) -> str:
    """The file and line where a key gets its value, ``ctc.yaml:72``; the recipe's file if none has it."""
    return next((f"{path}:{level.lc.key(key)[0] + 1}" for path, level in levels(files) if key in level),
                str(files[0][0]))


def named(key: str, files: Files, overrides: Mapping[str, Any]) -> str:
    """The name in ``key: !name:NAME`` before references are resolved; empty if the value is anything else."""
    value = next((level[key] for _, level in [(None, overrides), *levels(files)] if key in level), None)
    kind, _, name = tag_of(value).partition(":")
    return name if kind == "!name" else ""


def depth(key: object, files: Files) -> int:
    """The index of the file that a key belongs to: the first that has it, else the last, so that all see it."""
    return next((i for i, (_, tree) in enumerate(files) if key in tree), len(files) - 1)


def place_overrides(overrides: Mapping[str, Any], files: Files) -> dict[str, Any]:
    """Overrides as a tree in which each key is nested under ``recipe`` as deep as the file it belongs to."""
    placed: dict[str, Any] = {}
    for key, value in overrides.items():
        node = placed
        for _ in range(depth(key, files)):
            node = node.setdefault(BASE, {})
        if key == BASE and isinstance(value, Mapping):
            _insert(node.setdefault(BASE, {}), value)
        else:
            node[key] = value
    return placed


def _insert(tree: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Add values; later ones win, and a plain mapping changes parts of what is there."""
    for key, value in given.items():
        old = tree.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping) and not tag_of(value):
            _insert(old, value)
        else:
            tree[key] = value
