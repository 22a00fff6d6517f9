"""A recipe's files: which rests on which, and the file that each key of an override belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from sbkit.errors import SbkitError
from sbkit.recipe.source import BASE, INCLUDE, Node, ShallowComposer

Files = list[tuple[Path, Mapping[str, Any]]]


def read_plain(path: Path) -> dict[str, Any]:
    """The YAML as a tree with its tags, nothing imported and nothing built."""
    try:
        yaml = YAML()
        yaml.Composer = ShallowComposer
        text = path.read_text(encoding="utf-8")
        tree = yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise SbkitError(f"{path}{where}: {error.problem or error.context}") from error
    except UnicodeDecodeError as error:
        raise SbkitError(f"{path} is not UTF-8 text: {error}") from error
    except YAMLError as error:
        raise SbkitError(f"{path} is no YAML: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise SbkitError(f"cannot read {path}: {error.strerror}") from error
    if text.startswith("%"):
        raise SbkitError(f"{path}: a recipe takes no directives", hint="remove the lines down to ---")
    if not isinstance(tree, dict):
        raise SbkitError(f"{path} holds no key: value pairs")
    return tree


def tag_of(value: Any) -> str:
    """``!new:torch.nn.Linear``, ``!ref``, ...; empty for plain data."""
    return value.tag if isinstance(value, Node) else str(getattr(getattr(value, "tag", None), "value", None) or "")


def chain(path: Path) -> Files:
    """The recipe and those it rests on, each with its tree."""
    found: Files = []
    while True:
        if any(path.resolve() == known.resolve() for known, _ in found):
            raise SbkitError(f"{path} includes itself")
        tree = read_plain(path)
        found.append((path, tree))
        tag = tag_of(tree.get(BASE))
        if not tag.startswith(INCLUDE):
            return found
        path = path.parent / tag[len(INCLUDE) :]


def levels(files: Files) -> Iterator[tuple[Path, Any]]:
    """The mappings whose keys are the recipe's, with their files: those first that win. A recipe has its own keys, and
    those that it gives to the one it rests on."""
    for path, tree in files:
        level: Any = tree
        while isinstance(level, Mapping):
            yield path, level
            below = level.get(BASE)
            level = below.value if isinstance(below, Node) else below


def keys(files: Files) -> list[Any]:
    """All keys of a recipe's files."""
    return [key for _, level in levels(files) for key in level]


def written(key: str, files: Files) -> str:
    """Where a key gets its value, ``ctc.yaml:72``; the recipe alone where no file has it."""
    return next((f"{path}:{level.lc.key(key)[0] + 1}" for path, level in levels(files) if key in level),
                str(files[0][0]))


def named(key: str, files: Files, overrides: Mapping[str, Any]) -> str:
    """What ``key: !name:NAME`` names, before references are followed; empty where it is written otherwise."""
    value = next((level[key] for _, level in [(None, overrides), *levels(files)] if key in level), None)
    kind, _, name = tag_of(value).partition(":")
    return name if kind == "!name" else ""


def depth(key: Any, files: Files) -> int:
    """Which of the files a key belongs to: the first that has it; the last, whose references see most, if none does."""
    return next((i for i, (_, tree) in enumerate(files) if key in tree), len(files) - 1)


def place(overrides: Mapping[str, Any], files: Files) -> dict[str, Any]:
    """Overrides as a tree that reaches, through the includes, the file that each key belongs to."""
    placed: dict[str, Any] = {}
    for key, value in overrides.items():
        node = placed
        for _ in range(depth(key, files)):
            node = node.setdefault(BASE, {})
        if key == BASE and isinstance(value, Mapping):
            _put(node.setdefault(BASE, {}), value)
        else:
            node[key] = value
    return placed


def _put(tree: dict[str, Any], given: Mapping[str, Any]) -> None:
    """What is given later wins; a plain mapping changes parts of what an including recipe writes."""
    for key, value in given.items():
        old = tree.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping) and not tag_of(value):
            _put(old, value)
        else:
            tree[key] = value
