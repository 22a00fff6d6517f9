"""The files of a recipe: which is based on which, and to which of them the key of an override belongs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sbkit.recipe.source import BASE, INCLUDE, REFERENCE, Findings, Node, from_python, read_file

Files = list[tuple[Path, Node]]


def chain(path: Path, findings: Findings) -> Files:
    """The file of a recipe and those it is based on, each with its tree as it is written; empty if it can't be read.

    findings : takes what is wrong with this file; mistakes in the others are reported when they are included
    """
    files: Files = []
    seen: set[Path] = set()
    while path.resolve() not in seen and (root := read_file(path, Findings() if files else findings)) is not None:
        seen.add(path.resolve())
        files.append((path, root))
        base = root.value.get(BASE)
        if base is None or not base.tag.startswith(INCLUDE):
            break
        path = included_path(base.tag, path)
    return files


def levels(files: Files) -> Iterator[tuple[Path, Node]]:
    """The mappings with keys of a recipe, each with its file; the first one that has a key decides its value.

    Each file has its own keys, and then those under ``recipe``, which override keys of the file it is based on.
    """
    for path, root in files:
        level: Node | None = root
        while level is not None and isinstance(level.value, dict):
            yield path, level
            level = level.value.get(BASE)


def keys(files: Files) -> list[Any]:
    """The keys of all files of a recipe, including repeated ones."""
    return [key for _, level in levels(files) for key in level.value]


def written(key: str, files: Files) -> str:
    """The file and line where a key gets its value, ``ctc.yaml:72``; the recipe's file if none has it."""
    return next((f"{path}:{level.place_of(key).line}" for path, level in levels(files) if key in level.value),
                str(files[0][0]))


def named(key: str, files: Files, overrides: Mapping[str, Any]) -> str:
    """The name in ``key: !name:NAME`` before references are resolved; empty if the value is anything else."""
    node = from_python(overrides[key], key) if key in overrides else next(
        (level.value[key] for _, level in levels(files) if key in level.value), None)
    kind, _, name = ("" if node is None else node.tag).partition(":")
    return name if kind == "!name" else ""


def place(given: Node, files: Files) -> Node:
    """Overrides of a recipe, each nested under ``recipe`` as deep as the file that its key belongs to.

    That is the first file that has the key, else the last one, so that all see it.
    """
    placed = Node({}, given.place, given.key)
    for key, value in given.value.items():
        into = placed
        for _ in range(next((i for i, (_, root) in enumerate(files) if key in root.value), len(files) - 1)):
            into = into.value.setdefault(BASE, Node({}, given.place, BASE))
        if key == BASE and BASE in into.value and isinstance(value.value, dict):
            _insert(into.value[BASE], value)
        else:
            into.value[key], into.key_places[key] = value, given.place_of(key)
    return placed


def _insert(into: Node, given: Node) -> None:
    """Add values; later ones win, and a plain mapping changes parts of what is there."""
    for key, value in given.value.items():
        old = into.value.get(key)
        if old is not None and isinstance(old.value, dict) and isinstance(value.value, dict) and not value.tag:
            _insert(old, value)
        else:
            into.value[key], into.key_places[key] = value, given.place_of(key)


def referred(files: Files) -> set[str]:
    """The parts of all references: ``a`` and ``b`` of ``<a[b]>``."""
    texts = [str(node.value) for _, root in files for node in _references(root)]
    return {part for text in texts for match in REFERENCE.findall(text) for part in re.split(r"[<>\[\].]", match)}


def check_shadowed(files: Files, findings: Findings) -> None:
    """Report keys beside ``recipe`` that an included file has as well and refers to.

    References of that file find its own key, so the one beside ``recipe`` would change nothing there.
    """
    for i, (_, root) in enumerate(files[:-1]):
        for key in root.value:
            blind = next((path for path, other in files[i + 1:] if key in other.value and _refers(other, key)), None)
            if key != BASE and blind is not None:
                findings.error("shadowed", root.place_of(key), str(key),
                               f"it stands beside `{BASE}`, so the references of {blind.name} don't see it",
                               f"indent it, as one of the keys under `{BASE}`")


def included_path(tag: str, path: Path) -> Path:
    """The file that a tag ``!include:FILE`` in the file ``path`` names."""
    return Path(os.path.normpath(path.parent / tag[len(INCLUDE):]))


def _references(root: Node) -> list[Node]:
    return [node for node in root.walk() if node.tag in ("!ref", "!copy") and node.scalar]


def _refers(root: Node, key: object) -> bool:
    """Whether a reference in a file begins with this key."""
    named = re.compile(rf"<{re.escape(str(key))}[\[.>]")
    return any(named.search(str(node.value)) for node in _references(root))
