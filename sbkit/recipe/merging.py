"""Merges the files of a recipe into one YAML, with overrides applied and references resolved as in HyperPyYAML.

It differs from HyperPyYAML in two ways, so that a recipe can replace any part of the one it is based on:

- HyperPyYAML merges a mapping into the value that it overrides, and keeps that value's tag. Here a value with a tag
  (``!new:``, ``!name:``, ``!apply:``, ``!ref``, ...) replaces the whole value; a plain mapping changes parts of it,
  including arguments of an object that is written without any.
- A reference under an ``!include:``, if its key isn't in its own file, means a key of the included file.

``sbkit.recipe.resolve`` does the same for the check, on trees with line numbers.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperpyyaml import core
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from sbkit.errors import SbkitError
from sbkit.recipe.includes import Tree, chain, place_overrides, read_plain, tag_of
from sbkit.recipe.source import INCLUDE, REFERENCE, TAKES_PARTS, first_key, own_name


def merged(path: Path, overrides: Mapping[str, Any]) -> str:
    """The text of an equivalent recipe without includes and references."""
    return _merged(path, place_overrides(overrides, chain(path)), (path.resolve(),))


def _merged(path: Path, overrides: Mapping[str, Any], inside: tuple[Path, ...], whole: frozenset[int] = frozenset(),
            ) -> str:
    tree = read_plain(path)
    update(tree, overrides, path, whole)
    _File(path, tree, inside).walk(tree, "")
    _in_block_style(tree, set())
    _comments_behind_references(tree, set())
    text = io.StringIO()
    YAML().dump(tree, text)
    return text.getvalue()


def _in_block_style(tree: object, seen: set[int]) -> bool:
    """Give mappings and lists with objects that take arguments the block style; return whether there are any.

    Within brackets, ruamel.yaml (and so HyperPyYAML) drops the braces of such arguments when it writes them.
    """
    if not isinstance(tree, (CommentedMap, CommentedSeq)) or id(tree) in seen:
        return False
    seen.add(id(tree))
    inside = [_in_block_style(child, seen) for child in (tree.values() if isinstance(tree, CommentedMap) else tree)]
    if any(inside):
        tree.fa.set_block_style()
    if tag_of(tree) and len(tree):
        tree.fa.set_block_style()
        return True
    return any(inside)


def _comments_behind_references(tree: object, seen: set[int]) -> None:
    """Keep a comment behind a reference to an object in its place: ruamel.yaml would write it into the object."""
    if not isinstance(tree, (CommentedMap, CommentedSeq)):
        return
    seen.add(id(tree))
    keys = list(tree) if isinstance(tree, CommentedMap) else list(range(len(tree)))
    for at, key in enumerate(keys):
        child = tree[key]
        if id(child) not in seen:
            _comments_behind_references(child, seen)
        elif isinstance(tree, CommentedMap) and key in tree.ca.items and tree.ca.items[key][2] is not None:
            comment, tree.ca.items[key][2] = tree.ca.items[key][2], None
            comment.value = comment.value.removeprefix("\n")
            if at + 1 < len(keys):
                tree.ca.items.setdefault(keys[at + 1], [None] * 4)[1] = [comment]
            else:
                tree.ca.comment = tree.ca.comment or [None, None]
                tree.ca.end = [comment]


def update(tree: Tree, given: Mapping[str, Any], path: Path, whole: frozenset[int] = frozenset(), within: str = "",
           ) -> None:
    """Apply overrides to a tree: a plain mapping changes parts of a value, anything else replaces it.

    whole: ids of plain mappings that replace the whole value nevertheless
    """
    for key, value in given.items():
        old = tree.get(key)
        if key not in tree or tag_of(value) or id(value) in whole or not isinstance(value, Mapping):
            tree[key] = value
        elif isinstance(old, Mapping):
            update(old, value, path, whole, f"{within}{key}.")
        elif tag_of(old).startswith(TAKES_PARTS) and getattr(old, "value", None) in ("", None):
            tree[key] = CommentedMap(value)
            tree[key].yaml_set_ctag(old.tag)
        elif type(value) is not dict and not isinstance(old, list) and not tag_of(old):  # from a file, not from --a.b
            tree[key] = value
        else:
            raise SbkitError(f"{path}: {own_name(within + str(key))} has no parts that could be set one by one",
                             hint="run sbkit check for details")


class _File:
    """Resolves one file from top to bottom."""

    def __init__(self, path: Path, tree: dict[str, Tree], inside: tuple[Path, ...]):
        self.path, self.tree, self.inside = path, tree, inside
        self.whole: set[int] = set()

    def walk(self, node: Tree, key: str, included: bool = False) -> Tree:
        """The node with everything in it resolved."""
        tag = tag_of(node)
        included = included or tag.startswith(INCLUDE)
        if isinstance(node, (dict, list)):
            for part, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
                node[part] = self.walk(child, f"{key}.{part}" if key else str(part), included)
                if included and tag_of(child) and isinstance(node[part], Mapping) and not tag_of(node[part]):
                    self.whole.add(id(node[part]))
        if tag == "!PLACEHOLDER":
            key = own_name(key)
            raise SbkitError(f"{self.path}: {key} is left to you (!PLACEHOLDER)", hint=f"give it: --{key} VALUE")
        if tag in ("!ref", "!copy"):
            return self._follow(node, tag == "!copy", included)
        if tag.startswith(INCLUDE):
            return self._include(node, tag)
        if tag.startswith("!applyref:"):
            return core._applyref_function(tag[len("!applyref:"):], node)
        return node

    def _follow(self, node: Tree, copy: bool, included: bool) -> Tree:
        foreign = [text for text in REFERENCE.findall(node.value) if first_key(text) not in self.tree]
        if not included or not foreign:
            found = core.recursive_resolve(node.value, [], self.tree, copy)
            return self.walk(found, "") if included and isinstance(found, (dict, list)) else found

        def known(match: re.Match[str]) -> str:
            text = match[0]
            return text if text in foreign else str(core.recursive_resolve(text, [], self.tree, copy))

        node.value = REFERENCE.sub(known, node.value)
        return node

    def _include(self, node: Tree, tag: str) -> Tree:
        path = self.path.parent / tag[len(INCLUDE):]
        if path.resolve() in self.inside:
            raise SbkitError(f"{path} includes itself")
        given = place_overrides(node, chain(path)) if isinstance(node, dict) else {}
        return YAML().load(_merged(path, given, (*self.inside, path.resolve()), frozenset(self.whole)))
