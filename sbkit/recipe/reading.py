"""Reads a recipe and finds the mistakes that can be seen without building it, in names, arguments and values."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sbkit.recipe.keys import COMPLETE, NULL
from sbkit.recipe.names import brain_class, check_names, declared, hparams_read
from sbkit.recipe.report import did_you_mean, listed
from sbkit.recipe.resolve import flatten, resolve
from sbkit.recipe.run_options import RUN_OPTIONS
from sbkit.recipe.settings import check_settings
from sbkit.recipe.signatures import ForbiddenImport, bind, kind_of, kind_wanted, locate
from sbkit.recipe.source import UNKNOWN, Findings, Node, Place
from sbkit.recipe.values import check_text, static

#: Packages that may be imported, because the check itself uses them.
PACKAGES = ("speechbrain", "torch", "sbkit")
_CALLED = ("!apply", "!applyref")


def read(path: Path, overrides: Mapping[str, Any], findings: Findings) -> Node | None:
    """Resolve and validate a recipe: one tree of resolved values, None if it can't be read.

    findings : gets all mistakes
    """
    resolved = resolve(path, overrides, findings)
    if resolved.root is None:
        return None
    root = flatten(resolved.root)
    validate(root, resolved.referred, path, findings)
    return root


def read_without_imports(path: Path, overrides: Mapping[str, Any], findings: Findings) -> tuple[Node | None, list[str]]:
    """The same where only ``PACKAGES`` are imported, and notes on what wasn't checked for that."""
    resolved = resolve(path, overrides, findings, PACKAGES)
    if resolved.root is None:
        return None, []
    root, notes, arguments = _without_unchecked(flatten(resolved.root), findings)
    validate(root, resolved.referred, path, findings, arguments)
    return root, notes


def _without_unchecked(root: Node, findings: Findings) -> tuple[Node, list[str], list[Node]]:
    """The tree in which what must not be imported or called is unknown, notes on what won't be checked, and the
    arguments of what is unknown, which can be checked by themselves."""
    notes: dict[tuple[str, int, int, str], str] = {}
    for node in root.walk():
        why, _ = _why_unchecked(node.tag)
        if why:
            place = node.place
            notes[place.file, place.line, place.column, node.key] = ": ".join(filter(None, (str(place), node.key, why)))

    waiting: list[Node] = []

    def without(node: Node) -> Node:
        _, importable = _why_unchecked(node.tag)
        if importable:
            return node
        if node is root:  # the keys of a file with a tag can be checked
            return dataclasses.replace(node, tag="")
        waiting.extend(node.children())
        return dataclasses.replace(node, tag="", value=UNKNOWN)

    known = findings.mapped(root, without)
    arguments: list[Node] = []
    while waiting:  # an argument may have unknown parts of its own
        arguments.append(findings.mapped(waiting.pop(0), without))
    return known, [notes[place] for place in sorted(notes)], arguments


def validate(root: Node, referred: Collection[str], path: Path, findings: Findings,
             arguments: Sequence[Node] = ()) -> None:
    """Find the mistakes in a resolved recipe that can be seen without building it.

    referred : the keys that references name
    path : the recipe's file, which lacks the keys that are missing
    arguments : of parts that the tree lacks, because they are unknown
    """
    nodes = list(dict.fromkeys(node for top in (root, *arguments) for node in top.walk()))
    for node in nodes:  # texts first, so that an argument that refers to one isn't reported again
        for child in node.children():
            if child.scalar and child.value is not UNKNOWN:
                check_text(child, findings, in_list=isinstance(node.value, list))
    check_settings(root, findings)
    for node in nodes:
        if node.value is not UNKNOWN and not findings.is_reported(node):
            _check_tag(node, findings)
    _check_layers(root, findings)
    _keep_the_graver(findings)
    _check_needed(root, path, findings)
    _check_brain(root, findings)
    check_names(root, referred, findings)


def _check_tag(node: Node, findings: Findings) -> None:
    """Check that a tag is one of HyperPyYAML's, what it names, and the arguments of that."""
    kind, colon, _ = node.tag.partition(":")
    if kind in _CHECK_OF_USE and colon:
        _check_named(node, findings)
    elif node.tag not in _TAGS_WITHOUT_NAME and not node.tag.startswith(_CHECKED_ELSEWHERE):
        _report_unknown_tag(node, findings)


def _check_named(node: Node, findings: Findings) -> None:
    """Check a tag with a name, such as ``!new:torch.nn.Linear``: the name, what it is, and how that is used."""
    kind, _, name = node.tag.partition(":")
    if not name:
        rest = str(node.value).strip() if node.scalar else "NAME"
        findings.wrong(node, "bad-name", f"{kind}: has no name after the colon",
                       f"write {kind}:{rest} without a space")
        return
    if node.scalar and node.value not in ("", None):
        findings.wrong(node, "lost-argument", f"{node.value!r} after {node.tag} is not passed to it",
                       "write its arguments as a mapping, one key: value per line, or as a list")
        return
    try:
        target = locate(name)
    except LookupError as error:
        message, hint = error.args
        findings.wrong(node, "no-such-name", f"{node.tag} can't be found: {message}", hint)
        return
    wanted = kind_wanted(kind, target)
    if wanted:
        findings.wrong(node, "wrong-kind", f"{node.tag} is {kind_of(target)}", wanted)
        return
    # A constant under !name: can't be called either, so it takes no arguments.
    check_use = _CHECK_OF_USE[kind] if callable(target) else _check_no_arguments
    check_use(node, target, findings)


def _check_call(node: Node, target: Any, findings: Findings) -> None:  # of any class or function
    """Check arguments with which it is called."""
    bind(target, node, findings)


def _check_partial(node: Node, target: Any, findings: Findings) -> None:  # of any class or function
    """Check arguments to which others are added when it is called."""
    bind(target, node, findings, partial=True)


def _check_no_arguments(node: Node, target: Any, findings: Findings) -> None:  # anything that has a name
    """Report arguments of what takes none."""
    if not node.scalar and node.value:
        findings.wrong(node, "too-many-arguments", f"{node.tag} is {kind_of(target)} and takes no arguments",
                       "remove them")


#: What is checked of the use of a name, by the tag before it.
_CHECK_OF_USE: dict[str, Callable[[Node, Any, Findings], None]] = {
    "!new": _check_call,
    "!name": _check_partial,
    "!apply": _check_call,
    "!applyref": _check_call,
    "!module": _check_no_arguments,
}
#: No tag, and HyperPyYAML's tags without a name. Resolving has replaced those of references, unless they are wrong.
_TAGS_WITHOUT_NAME = ("", "!ref", "!copy", "!PLACEHOLDER")
#: Beginnings of tags that another stage checks.
_CHECKED_ELSEWHERE = ("!!python/", "!include:")
_ALL_TAGS = (*(f"{kind}:" for kind in _CHECK_OF_USE), "!ref", "!copy", "!include:", "!PLACEHOLDER", "!tuple")


def _report_unknown_tag(node: Node, findings: Findings) -> None:
    tag, _, name = node.tag.partition(":")
    near = did_you_mean(tag, [tag.rstrip(":") for tag in _ALL_TAGS])
    takes_name = f"{near}:" in _ALL_TAGS
    if near in ("!ref", "!copy") and name:
        hint = f"did you mean {near} <{name}>?"
    elif near and takes_name:
        hint = f"did you mean {near}:{name or 'NAME'}?"
    elif near:
        hint = f"did you mean {near}{name}?"
    else:
        hint = f"tags are {listed(_ALL_TAGS)}"
    findings.wrong(node, "unknown-tag", f"there is no tag {node.tag}", hint)


def _check_layers(root: Node, findings: Findings) -> None:
    """Report layers that are only named where a run needs them built: under modules, and for a declared key."""
    keys = declared(root)
    waiting = [node for key, node in root.value.items() if key not in ("brain", "opt_class")  # classes are right there
               and (key == "modules" or (key in keys and keys[key].built))]
    for node in waiting:  # which grows
        kind, _, name = node.tag.partition(":")
        if kind == "!name" and not findings.unusable(node):
            cls = locate(name)
            if isinstance(cls, type) and issubclass(cls, torch.nn.Module):
                findings.wrong(node, "no-module", "this layer is only named, and was never built",
                               f"write !new:{name} instead of {node.tag}")
        elif not kind or name.startswith("torch.nn."):  # a list or mapping of layers
            waiting += [child for child in node.children() if child not in waiting]


def _keep_the_graver(findings: Findings) -> None:
    """Leave out the warnings that a value is a text where an error says that its type is wrong."""
    mistaken = {(f.file, f.line, f.key) for f in findings if f.code == "wrong-type" and f.severity == "error"}
    findings[:] = [f for f in findings if not f.code.endswith("-as-text") or f.severity == "error"
                   or (f.file, f.line, f.key) not in mistaken]


def _check_needed(root: Node, path: Path, findings: Findings) -> None:
    """Report needed keys that are missing or null, and ``modules`` that are no mapping."""
    for key, declaration in declared(root).items():
        if not declaration.needed:
            continue
        node = root.value.get(key)
        if node is None:
            near = did_you_mean(key, map(str, root.value), cutoff=0.8)
            findings.error("missing-key", Place(str(path)), key, f"the recipe lacks this key: {declaration.what}",
                           f"is {near} a misspelling of it?" if near else COMPLETE)
        elif static(node) is None and not findings.is_reported(node):
            findings.wrong(node, "missing-key", f"it {NULL}", COMPLETE)
    modules = root.value.get("modules")
    if modules is not None and not findings.is_reported(modules) and not isinstance(modules.value, dict):
        findings.error("wrong-type", root.place_of("modules"), "modules", "it must be a mapping of names to modules",
                       "write `model: !ref <model>` under it")


def _check_brain(root: Node, findings: Findings) -> None:
    """Report a class under ``brain`` that is no Brain, and keys that one reads and the recipe lacks."""
    cls = brain_class(root)
    if cls is None or findings.is_reported(root.value["brain"]):
        return
    if not any(base.__name__ == "Brain" for base in cls.__mro__):
        findings.wrong(root.value["brain"], "wrong-kind", f"{cls.__name__} is not a Brain",
                       "write !name:sbkit.tasks.ctc.CTC")
        return
    used, tested = hparams_read(cls)  # keys that it tests for may be missing
    for name in sorted(used - tested - set(root.value) - set(RUN_OPTIONS) - set(declared(root))):
        near = did_you_mean(name, map(str, root.value), cutoff=0.8)
        findings.warning("missing-key", root.value["brain"].place, "brain",
                         f"{cls.__name__} reads the key {name}, which the recipe lacks",
                         f"is {near} a misspelling of it?" if near else f"add {name}: VALUE")


# ---------------------------------------------------------------------------------------------- what is not checked


def _why_unchecked(tag: str) -> tuple[str, bool]:
    """Why a tag is not checked, empty if it is; and whether the name in it may be imported."""
    kind, _, name = tag.partition(":")
    if tag.startswith("!!python/"):
        return f"{tag} runs Python when it is read", False
    if tag == "!apply:getattr":  # what a reference <key.attribute> becomes
        return "an attribute of an object that is not built", False
    if kind not in (*_CALLED, "!new", "!name", "!module") or not name:
        return "", True
    try:
        locate(name, PACKAGES)
    except ForbiddenImport as error:
        return f"{tag}: {error}", False
    except LookupError:  # reported with the other mistakes
        return "", True
    return (f"{tag} is called when the recipe is loaded" if kind in _CALLED else ""), True


@contextlib.contextmanager
def without_imports_from(*folders: Path) -> Iterator[None]:
    """Import nothing from these folders within it, because they may contain files named like a missing package."""
    left_out = {os.path.realpath(folder) for folder in folders}
    with mock.patch.object(sys, "path", [folder for folder in sys.path if os.path.realpath(folder) not in left_out]):
        yield
