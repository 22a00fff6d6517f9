"""The files of a recipe: which is based on which, and to which of them the key of an override belongs."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from sbkit.errors import SbkitError, first_line
from sbkit.recipe.source import BASE, INCLUDE, REFERENCE, Findings, Node, ShallowComposer, read_file

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


class NodeChain:
    """The files of a recipe, as they are written; empty where the first can't be read.

    Arguments
    ---------
    path : the recipe
    findings : takes what is wrong with this file; mistakes in the others are reported when they are included
    """

    def __init__(self, path: Path, findings: Findings):
        self.files: list[tuple[Path, Node]] = []
        seen: set[Path] = set()
        while path.resolve() not in seen:
            seen.add(path.resolve())
            root = read_file(path, findings)
            if root is None:
                break
            self.files.append((path, root))
            findings = Findings()
            base = root.value.get(BASE)
            if base is None or not base.tag.startswith(INCLUDE):
                break
            path = included_path(base.tag, path)

    def __bool__(self) -> bool:
        return bool(self.files)

    @property
    def root(self) -> Node:
        """The tree of the recipe itself."""
        return self.files[0][1]

    @property
    def trees(self) -> Files:
        """The mappings of all files, as the functions above take them."""
        return [(path, root.value) for path, root in self.files]

    def place(self, given: Node) -> Node:
        """Values that are given under an include, each within the file that its key belongs to."""
        placed = Node({}, given.place, given.key)
        for key, value in given.value.items():
            into = placed
            for _ in range(depth(key, self.trees)):
                into = into.value.setdefault(BASE, Node({}, given.place, BASE))
            if key == BASE and BASE in into.value and isinstance(value.value, dict):
                _insert_nodes(into.value[BASE], value)
            else:
                into.value[key], into.key_places[key] = value, given.place_of(key)
        return placed

    def referred(self) -> set[str]:
        """The parts of all references: ``a`` and ``b`` of ``<a[b]>``."""
        texts = [str(node.value) for _, root in self.files for node in _references(root)]
        return {part for text in texts for match in REFERENCE.findall(text) for part in re.split(r"[<>\[\].]", match)}

    def check_shadowed(self, findings: Findings) -> None:
        """Tell of keys beside ``recipe`` that an included file has as well and refers to.

        References of that file find its own key, so the one beside ``recipe`` would change nothing there.
        """
        for i, (_, root) in enumerate(self.files[:-1]):
            for key in root.value:
                blind = next((path for path, other in self.files[i + 1:]
                              if key in other.value and _refers(other, key)), None)
                if key != BASE and blind is not None:
                    findings.error("shadowed", root.place_of(key), str(key),
                                   f"it stands beside `{BASE}`, so the references of {blind.name} don't see it",
                                   f"indent it, as one of the keys under `{BASE}`")


def included_path(tag: str, path: Path) -> Path:
    """The file that a tag ``!include:FILE`` in the file ``path`` names."""
    return Path(os.path.normpath(path.parent / tag[len(INCLUDE):]))


def _insert_nodes(into: Node, given: Node) -> None:
    """Add values; later ones win, and a plain mapping changes parts of what is there."""
    for key, value in given.value.items():
        old = into.value.get(key)
        if old is not None and isinstance(old.value, dict) and isinstance(value.value, dict) and not value.tag:
            _insert_nodes(old, value)
        else:
            into.value[key], into.key_places[key] = value, given.place_of(key)


def _references(root: Node) -> list[Node]:
    return [node for node in root.walk() if node.tag in ("!ref", "!copy") and node.scalar]


def _refers(root: Node, key: object) -> bool:
    """Whether a reference in a file begins with this key."""
    named = re.compile(rf"<{re.escape(str(key))}[\[.>]")
    return any(named.search(str(node.value)) for node in _references(root))
