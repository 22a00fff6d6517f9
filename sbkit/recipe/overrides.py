"""Overrides of a recipe's values: from the command line, and from a file that is based on it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.recipe.elsewhere import (
    DONE_BY_TORCHRUN,
    NAMED_ELSEWHERE,
    NEEDLESS,
    OPTIONS_OF_EVALUATE,
    OPTIONS_OF_TORCHRUN,
    REMARKS,
)
from sbkit.recipe.files import Files, levels, referred
from sbkit.recipe.report import COMMAND_LINE, did_you_mean
from sbkit.recipe.source import BASE, INCLUDE, Findings, Node, Place

#: Tags that may have no value, or a mapping of arguments (for an include, of overrides).
TAKES_PARTS = ("!new:", "!name:", "!apply:", "!applyref:", INCLUDE)
_COMMAND_LINE = Place()
#: Of a key on the command line without a value, such as ``--debug``.
_NO_VALUE = Place(column=-1)


def full_key(key: str, there: Collection[object]) -> str:
    """The key that an override means, if the recipe, which has the keys ``there``, has none of this name: hyphens are
    underscores, and ``data`` is short for ``data_folder``."""
    with_underscores = key.replace("-", "_")
    return "data_folder" if with_underscores == "data" and "data_folder" in there else with_underscores


def with_full_keys(overrides: Mapping[str, Any], there: Collection[object]) -> dict[str, Any]:
    """Overrides with the full names of keys that the recipe, which has the keys ``there``, lacks."""
    full = dict(overrides)
    for key in overrides:
        name = key if key in there else full_key(key, there)
        if name == key:
            continue
        if name in overrides:
            raise SbkitError("conflicting-options", f"--{key} and --{name} are the same key, which is given twice",
                             hint="leave one out", key=name)
        full[name] = full.pop(key)
    return full


def unknown_key(files: Files, key: str, value: object, known: Collection[str]) -> tuple[str, str]:
    """A message about a key on the command line that doesn't exist, and a hint.

    known : the keys and options that do
    """
    recipe_keys = {"test_only"}
    recipe_keys.update(str(name) for _, level in levels(files) for name in level.value)
    has_vocabulary = "output_neurons" in recipe_keys
    meant, near = _key_meant(files, key, value, known, recipe_keys)

    if key in OPTIONS_OF_TORCHRUN:
        text = f"={value}" if value and not isinstance(value, NoValue) else ""
        hint = f"it is an option of torchrun: torchrun --{key}{text} train.py RECIPE ..."
    elif key in NEEDLESS:
        hint = f"leave it out: {NEEDLESS[key]}"
    elif key in OPTIONS_OF_EVALUATE and "." not in (near or "") and has_vocabulary:  # that of a decoder has a dot
        hint = f"tests search by the recipe's decoder; afterwards, sbkit evaluate RUN {OPTIONS_OF_EVALUATE[key]} does"
    elif key in ("config", "hparams"):
        hint = "the recipe is named first, without an option"
    elif key.startswith("resume"):
        hint = "the same command resumes a run, without an option"
    elif key in DONE_BY_TORCHRUN:
        hint = "torchrun starts a process per device: torchrun --nproc_per_node=N train.py RECIPE ..."
    else:
        hint = f"did you mean --{near.removeprefix('--')}?" if near else "sbkit show prints its keys"
        if meant in REMARKS:
            hint += f" {REMARKS[meant]}"
    return f"{files[0][0]} has no key {key}", hint


def _key_meant(files: Files, key: str, value: object, known: Collection[str],
               recipe_keys: Collection[str]) -> tuple[str, str | None]:
    """The name that another library has for a key of ours, empty if it isn't such a name, and the key that was
    probably meant, if any."""
    nested = _keys_inside(value)  # NeMo's have parts, such as trainer.max_epochs
    longer_names = [name for name in NAMED_ELSEWHERE if len(name) > 5]  # much resembles train
    similar = None if nested else did_you_mean(key, [*known, *longer_names], 0.75)
    candidates = [(name, NAMED_ELSEWHERE[name]) for name in (key, *nested, similar) if name in NAMED_ELSEWHERE]
    candidates += [(name, name) for name in nested]
    for name, ours in candidates:
        top = ours.partition(".")[0]
        is_network = ours == "decoder" and "output_neurons" not in recipe_keys
        if top in recipe_keys and top in known and not is_network:
            return name, ours

    parents = {name for _, level in levels(files) for name, node in level.value.items()
               if isinstance(node.value, dict) and key in node.value}
    if len(parents) == 1:
        return "", f"{parents.pop()}.{key}"
    cutoff = 0.9 if nested else 0.75
    near = did_you_mean(key, known, cutoff) or did_you_mean(f"--{key}", [f"--{name}" for name in known], cutoff)
    return "", near


def _keys_inside(value: object) -> list[str]:
    """The names of all parts of a value, outer ones first."""
    names: list[str] = []
    waiting = [value]
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, Mapping):
            names += map(str, part)
            waiting += part.values()
    return names


class NoValue(int):
    """The value of a key without one on the command line: true, if the recipe's own value is true or false."""

    def __repr__(self) -> str:
        return "True"


def from_python(value: Any, key: str, place: Place = _COMMAND_LINE) -> Node:  # ruamel's scalars have a tag and a value
    """Convert a value from the command line, or from a program, to a Node."""
    tag = getattr(getattr(value, "tag", None), "value", None) or ""
    if isinstance(value, Mapping):
        parts = {name: from_python(part, f"{key}.{name}", place) for name, part in value.items()}
        return Node(parts, place, key, tag, dotted=type(value) is dict)
    if isinstance(value, (list, tuple)):
        return Node([from_python(v, f"{key}[{i}]", place) for i, v in enumerate(value)], place, key, tag)
    if tag:
        return Node(value.value, place, key, tag.replace("!tuple", ""))
    if isinstance(value, NoValue):
        return Node(True, _NO_VALUE, key, computed=True)
    # A plain Python value, without ruamel's information on how it was written.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return Node(value if kind is bool else kind(value), place, key, computed=True)
    return Node(value if value is None or isinstance(value, bytes) else str(value), place, key, computed=True)


def named(key: str, files: Files, overrides: Mapping[str, Any]) -> str:
    """The name in ``key: !name:NAME`` before references are resolved; empty if the value is anything else."""
    node = from_python(overrides[key], key) if key in overrides else next(
        (level.value[key] for _, level in levels(files) if key in level.value), None)
    kind, _, name = ("" if node is None else node.tag).partition(":")
    return name if kind == "!name" else ""


def override(files: Files, given: Node, findings: Findings, declared: Collection[str] = ()) -> None:
    """Apply overrides to a recipe's first file: a plain mapping changes parts of a value, anything else replaces it.

    Overrides of a file that this one is based on are put under ``recipe``, for that file.

    declared : keys that aren't misspelt even if no file has them
    """
    placed = Node({}, given.place, given.key)
    for key, value in given.value.items():
        into = placed
        for _ in range(_depth_of(key, files)):
            into = into.value.setdefault(BASE, Node({}, given.place, BASE))
        if key == BASE and BASE in into.value and isinstance(value.value, dict):
            _insert(into.value[BASE], value)
        else:
            _set(into, key, value, given)
    _apply(files[0][1], placed, findings, declared)


def _depth_of(key: object, files: Files) -> int:
    """How often ``recipe`` has to be opened to reach the mapping that has a key; a new key belongs to the last file."""
    for depth_of_file, file in enumerate(files):
        for depth_in_file, (_, level) in enumerate(levels([file])):
            if key in level.value:
                return depth_of_file + depth_in_file
    return len(files) - 1


def _set(into: Node, key: object, value: Node, given: Node) -> None:
    """Set a key as it is written in another mapping, with its place and comments."""
    into.value[key] = value
    into.key_places[key] = given.place_of(key)
    if key in given.comments:
        into.comments[key] = given.comments[key]


def _insert(into: Node, given: Node) -> None:
    """Add values: they replace earlier ones, and a plain mapping changes parts of a mapping."""
    for key, value in given.value.items():
        old = into.value.get(key)
        if old is not None and isinstance(old.value, dict) and isinstance(value.value, dict) and not value.tag:
            _insert(old, value)
        else:
            _set(into, key, value, given)


def _apply(root: Node, given: Node, findings: Findings, declared: Collection[str], partial: bool = False,
           nested: bool = False) -> None:
    """Apply overrides to a mapping, whose keys are then in the order of ``_order_with``.

    partial : the mapping holds overrides of an included file, so its keys aren't all there are
    nested : the mapping is a value within a file, see ``_order_with``
    """
    partial = partial or root.tag.startswith(INCLUDE)
    order = _order_with(root, given, nested)

    for key, new in given.value.items():
        target = root.value.get(key)
        if target is not None and new.place == _NO_VALUE and not _may_be_true(root, target):
            example = "VALUE" if target.tag or not isinstance(target.value, (int, float, str)) else target.value
            findings.error("no-value", new.place, target.key, "it has no value",
                           f"write one after it, such as --{target.key} {example or 'VALUE'}")
        # A new key, or what replaces a whole value.
        elif target is None or new.tag or new.whole or not isinstance(new.value, dict):
            if key not in declared and not partial:
                _report_typo(root, given, key, new, findings)
            _set(root, key, new, given)
        # From here on, the override is a plain mapping: it changes parts of the value.
        elif isinstance(target.value, dict):
            _apply(target, new, findings, declared, partial and not target.tag, not target.tag.startswith(INCLUDE))
        # An object without arguments gets its first ones.
        elif target.tag.startswith(TAKES_PARTS) and target.value in ("", None):
            places = {part: new.place_of(part) for part in new.value}
            root.value[key] = Node(new.value, target.place, target.key, target.tag, key_places=places)
        # A mapping in a file can replace a number or a text, but parts one by one, as --a.b 1, are a mistake there.
        elif not new.dotted and target.scalar and not target.tag:
            _set(root, key, new, given)
        else:
            _report_no_parts(root, target, new, findings)

    ordered = {key: root.value[key] for key in order if key in root.value}
    root.value.clear()
    root.value.update(ordered)


# The order in which a recipe's keys are built matters twice: random initial weights depend on it, and a reference to
# another reference works only if that one is further up. So a recipe and what it overrides are built in the order in
# which they read, by three rules for keys that are new:
#
# 1. A new key comes directly before the next key of its file that the mapping has already.
# 2. If none follows in its file, it is the last. But at the top of a recipe a plain value comes before the next key of
#    any file that the mapping has: the new value of that one may refer to it. Objects don't, as they draw random
#    numbers when they are built, and new keys of a value within a file don't, as nothing there refers to them.
# 3. No rule puts a new key before one that it refers to: it comes directly after that.
#
# For example, a base has the keys on the left and its recipe those in the middle, where rate is from the command line.
# By rule 1 depth comes before width; by rule 2 rate comes before epochs, and extra is the last.
#
#     base.yaml                    overrides                           built in this order
#     ---------                    ---------                           -------------------
#     seed: 1                      depth: 3                            seed
#     width: 4                     width: !ref <depth>                 depth, width
#     model: !new:Model            rate: 2  (command line)             model
#     epochs: 3                    epochs: !ref <rate>                 rate, epochs
#                                  extra: !new:Loss                    extra
def _order_with(root: Node, given: Node, nested: bool) -> list[Any]:
    """The keys of a mapping and the new ones among its overrides, in the order in which they are to be built.

    nested : the mapping is a value within a file
    """
    order = list(root.value)

    def insert(added: list[Any], before: object) -> None:
        position_of_next = order.index(before)
        referred_by_added = referred([(Path(given.place_of(key).file), given.value[key]) for key in added])
        positions_behind_referred = [index + 1 for index, key in enumerate(order) if key in referred_by_added]
        position = max([position_of_next, *positions_behind_referred])
        order[position:position] = added

    # Rule 1: new keys wait for the next key of their file that the mapping has.
    waiting: dict[str, list[Any]] = {}
    for key in given.value:
        file = given.place_of(key).file
        if key not in root.value:
            waiting.setdefault(file, []).append(key)
        elif file in waiting:
            insert(waiting.pop(file), key)

    # Rule 2: those that still wait have no such key in their file.
    keys = list(given.value)
    for key in itertools.chain(*waiting.values()):
        next_of_any_file = next((later for later in keys[keys.index(key):] if later in order), None)
        is_plain = given.value[key].scalar and given.value[key].tag in ("", "!ref", "!copy")
        if next_of_any_file is not None and is_plain and not nested:
            insert([key], next_of_any_file)
        else:
            order.append(key)
    return order


def _report_no_parts(root: Node, target: Node, new: Node, findings: Findings) -> None:
    """Report overrides of parts of a value that has no parts.

    root : the mapping with the value ``target``
    """
    last = _last_part(new)
    similar = NAMED_ELSEWHERE.get(last, last)
    if new.dotted and similar in root.value:
        advice = f"did you mean --{similar}?"
    elif target.tag in ("!ref", "!copy"):
        advice = f"it is {target.tag} {target.value}: set the parts of that, or replace all of {target.key}"
    elif isinstance(target.value, list) and target.tag:
        advice = "its arguments are a list: write them there as key: value, or replace all of it"
    elif target.value is None:
        advice = "it is null: give it a value, or !new:CLASS and its arguments"
    else:
        advice = f"give {target.key} one value"
    findings.error("override-structure", new.place, target.key,
                   f"{target.key} has no parts that could be set one by one ({target.place})", advice)


def _last_part(node: Node) -> str:
    """``c`` of an override ``a.b.c``, the first of several."""
    name: object = None
    while isinstance(node.value, dict) and node.value:
        name, node = next(iter(node.value.items()))
    return str(name)


def _may_be_true(root: Node, target: Node) -> bool:
    """Whether a value is true or false, or may be because its reference isn't resolved here."""
    for _ in root.value:  # at most one step per key, in case references are circular
        reference = re.fullmatch(r"<([\w.\[\]]+)>", str(target.value)) if target.tag == "!ref" else None
        if reference is None:
            return isinstance(target.value, bool)
        name = reference[1]
        if name not in root.value:
            return True
        target = root.value[name]
    return True


def _report_typo(root: Node, given: Node, key: object, new: Node, findings: Findings) -> None:
    """Report a new key of a mapping that is similar to an existing one, unless one file has both.

    given : all overrides of the mapping; one of them may have got its value from the command line
    """
    if key in root.value or not isinstance(key, str) or root.tag.startswith(("!new:", "!name:", "!apply")):
        return  # arguments are compared with the signature
    files_of_new = COMMAND_LINE, new.place.file
    of_other_files = [name for name in root.value if isinstance(name, str) and name not in given.value
                      and root.place_of(name).file not in files_of_new]
    options = [name for name in of_other_files if root.value[name].tag or not new.tag]
    near = did_you_mean(key, options, cutoff=0.85)
    if near and not re.search(r"\d", key):  # layer1 beside layer2 is no typo
        findings.error("unknown-override", new.place, root.key_of(key),
                       f"{root.key or 'the recipe'} has no key {key} to override", f"did you mean {near}?")
