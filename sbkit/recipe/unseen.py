"""What ``check --no-run`` leaves alone: names of a recipe outside of three packages, and all that is called."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from sbkit.recipe.signatures import Outside, locate
from sbkit.recipe.source import UNKNOWN, Node

#: What may be imported; whoever runs the check has it already, and runs it.
PACKAGES = ("speechbrain", "torch", "sbkit")
_CALLED = ("!apply", "!applyref")


def hide(root: Node) -> list[str]:
    """Make unknown what a look may not import; where each of that stands, and what is called there."""
    told = {}
    for node in list(root.walk()):
        why = _why_unseen(node)
        if why:
            told[node.place.file, node.place.line, node.place.column, node.key] = f"{node.place}: {node.key}: {why}"
    return [told[place] for place in sorted(told)]


def _why_unseen(node: Node) -> str:
    tag, (kind, _, name) = node.tag, node.tag.partition(":")
    if tag.startswith("!!python/"):
        node.value, node.tag = UNKNOWN, ""
        return f"{tag} runs Python when it is read"
    if tag == "!apply:getattr":  # what a reference <key.attribute> becomes
        node.value, node.tag = UNKNOWN, ""
        return "an attribute of what is not built"
    if kind not in (*_CALLED, "!new", "!name", "!module") or not name:
        return ""
    try:
        locate(name, PACKAGES)
    except Outside as error:
        node.value, node.tag = UNKNOWN, ""
        return f"{tag}: {error}"
    except LookupError:  # told with the other mistakes
        return ""
    return f"{tag} is called when the recipe is loaded" if kind in _CALLED else ""


@contextlib.contextmanager
def nothing_from(*folders: Path) -> Iterator[None]:
    """Within it none of these folders is a place to import from: a package that is missing may lie there as a trap."""
    before = list(sys.path)
    left_out = {os.path.realpath(folder) for folder in folders}
    sys.path[:] = [each for each in before if os.path.realpath(each) not in left_out]
    try:
        yield
    finally:
        sys.path[:] = before
