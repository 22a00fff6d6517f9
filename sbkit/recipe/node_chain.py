"""A recipe's files as trees of Nodes: the recipe, and each recipe that it is based on by ``recipe: !include:``."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sbkit.recipe.includes import Files, depth
from sbkit.recipe.source import BASE, INCLUDE, REFERENCE, Findings, Node, read_file


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
        """The mappings of all files, as ``sbkit.recipe.includes`` takes them."""
        return [(path, root.value) for path, root in self.files]

    def place(self, given: Node) -> Node:
        """Values that are given under an include, each within the file that its key belongs to."""
        placed = Node({}, given.place, given.key)
        for key, value in given.value.items():
            into = placed
            for _ in range(depth(key, self.trees)):
                into = into.value.setdefault(BASE, Node({}, given.place, BASE))
            if key == BASE and BASE in into.value and isinstance(value.value, dict):
                _insert(into.value[BASE], value)
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


def _insert(into: Node, given: Node) -> None:
    """Add values; later ones win, and a plain mapping changes parts of what is there."""
    for key, value in given.value.items():
        old = into.value.get(key)
        if old is not None and isinstance(old.value, dict) and isinstance(value.value, dict) and not value.tag:
            _insert(old, value)
        else:
            into.value[key], into.key_places[key] = value, given.place_of(key)


def _references(root: Node) -> list[Node]:
    return [node for node in root.walk() if node.tag in ("!ref", "!copy") and node.scalar]


def _refers(root: Node, key: object) -> bool:
    """Whether a reference in a file begins with this key."""
    named = re.compile(rf"<{re.escape(str(key))}[\[.>]")
    return any(named.search(str(node.value)) for node in _references(root))
