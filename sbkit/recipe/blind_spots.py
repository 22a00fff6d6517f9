"""What ``check --no-run`` doesn't look at: names outside of three packages, and everything that would be called."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from sbkit.recipe.signatures import Outside, locate
from sbkit.recipe.source import UNKNOWN, Node

#: Packages that may be imported: the check itself runs their code.
PACKAGES = ("speechbrain", "torch", "sbkit")
_CALLED = ("!apply", "!applyref")


def hide(root: Node) -> list[str]:
    """Make nodes unknown that must not be imported or called; return their places with the reasons."""
    notes = {}
    for node in list(root.walk()):
        why, known = _why_unseen(node.tag)
        if why:
            notes[node.place.file, node.place.line, node.place.column, node.key] = ": ".join(filter(None, (
                str(node.place), node.key, why)))
        if not known:
            node.tag = ""
            node.value = node.value if node is root else UNKNOWN  # the keys of a file with a tag can be checked
    return [notes[place] for place in sorted(notes)]


def _why_unseen(tag: str) -> tuple[str, bool]:
    """Why a tag is not looked at, empty if it is; and whether the name in it may be imported."""
    kind, _, name = tag.partition(":")
    if tag.startswith("!!python/"):
        return f"{tag} runs Python when it is read", False
    if tag == "!apply:getattr":  # what a reference <key.attribute> becomes
        return "an attribute of what is not built", False
    if kind not in (*_CALLED, "!new", "!name", "!module") or not name:
        return "", True
    try:
        locate(name, PACKAGES)
    except Outside as error:
        return f"{tag}: {error}", False
    except LookupError:  # reported with the other mistakes
        return "", True
    return (f"{tag} is called when the recipe is loaded" if kind in _CALLED else ""), True


@contextlib.contextmanager
def nothing_from(*folders: Path) -> Iterator[None]:
    """Import nothing from these folders within it, where files with the name of a missing package may lie."""
    before = list(sys.path)
    left_out = {os.path.realpath(folder) for folder in folders}
    sys.path[:] = [each for each in before if os.path.realpath(each) not in left_out]
    try:
        yield
    finally:
        sys.path[:] = before
