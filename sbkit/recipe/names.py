"""Top-level keys that code reads by name, and a check for keys of a recipe that have no effect."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from sbkit.recipe.files import COPIED, Files, keys
from sbkit.recipe.keys import Declared, is_task
from sbkit.recipe.overrides import NAMED_ELSEWHERE, NEEDLESS, REMARKS, named, unknown_key
from sbkit.recipe.report import did_you_mean
from sbkit.recipe.run_options import RUN_OPTIONS
from sbkit.recipe.signatures import ForbiddenImport, locate
from sbkit.recipe.source import Findings, Node, Place

#: The class with the keys of every recipe that has a ``brain``.
EVERY_TASK = "sbkit.runs.keys.TaskKeys"
#: Options of the running command, by ``arguments.command_options``, so that a misspelt one gets a suggestion.
COMMAND_OPTIONS = ["no-check"]


def brain_class(root: Node) -> type | None:
    """The class under ``brain``; None if the recipe names none, or it can't be imported."""
    brain = root.value.get("brain")
    if brain is None or not brain.tag.startswith(("!name:", "!new:")):  # the second is a mistake, reported elsewhere
        return None
    try:
        cls = locate(brain.tag.partition(":")[2])
    except LookupError:  # reported where the name is checked
        return None
    return cls if inspect.isclass(cls) else None


def declared(root: Node) -> Mapping[str, Declared]:
    """The keys that the class under ``brain`` declares; those of every task if it can't be imported."""
    if "brain" not in root.value:
        return {}
    declaring = getattr(brain_class(root), "Keys", None) or locate(EVERY_TASK)
    return declaring.declared()


def declared_in(files: Files, overrides: Mapping[str, Any], packages: tuple[str, ...] | None = None,
                ) -> Mapping[str, Declared]:
    """The same for files whose references aren't resolved yet; empty if the class can't be found.

    packages : packages that may be imported, all if None; for a class in another one, the keys of every task
    """
    try:
        name = named("brain", files, overrides)
        declaring = getattr(locate(name, packages), "Keys", None) if name else None
    except ForbiddenImport:
        declaring = locate(EVERY_TASK)
    except LookupError:  # reported where the name is checked
        declaring = None
    return declaring.declared() if declaring is not None else {}


def check_overrides(files: Files, overrides: Mapping[str, Any], findings: Findings,
                    packages: tuple[str, ...] | None = None) -> list[str]:
    """Find overrides of keys that neither the recipe has nor its task declares; return these keys.

    A key that is declared but not in the recipe has no parts that could be overridden one by one.
    """
    there = keys(files)
    new = [key for key in overrides if key not in there]
    declared = declared_in(files, overrides, packages) if new else {}
    unknown = [key for key in new if key not in declared or type(overrides[key]) is dict]
    options = *(key for key in there if isinstance(key, str)), *declared, *RUN_OPTIONS, *COMMAND_OPTIONS
    for key in unknown:
        message, hint = unknown_key(files, key, overrides[key], [name for name in options if name not in unknown])
        findings.error("unknown-override", Place(), f"--{key}", message, hint)
    return unknown


def check_names(root: Node, referred: Collection[str], findings: Findings) -> None:
    """Report keys without effect: nothing reads them, no reference names them, and they call nothing.

    referred: the keys that references in the recipe name
    """
    if "brain" not in root.value:  # a user's script may read any key
        return
    cls = brain_class(root)
    read, tested = hparams_read(cls) if cls is not None else (set(), set())
    known = declared(root)
    useful = set(known) | set(RUN_OPTIONS) | read | tested
    useful |= {key for key in referred if key in root.value}
    holders = Counter(child for node in root.walk() for child in node.children())
    useful |= {key for key, node in root.value.items() if holders[node] > 1}  # an anchor that an alias names
    reported = {finding.key for finding in findings}
    missing = read - set(root.value) | reported  # reported as missing, with similar names
    for key in root.value:
        if not isinstance(key, str) or key in useful | reported or key.startswith("__"):
            continue
        if root.value[key].tag.startswith("!apply"):  # calling it is its effect
            continue
        place = root.place_of(key)
        owner, dot, part = key.partition(".")
        if dot and owner in root.value:  # as on the command line, but a file is read as YAML
            inside = "".join(f"{{{name}: " for name in part.split(".")) + "..." + "}" * (part.count(".") + 1)
            findings.error("unread-key", place, key, f"in a file this is a separate key, not a part of {owner}",
                           f"write it inside, {owner}: {inside}, or use --{key} on the command line")
            continue
        beside = {each for each in useful if each in root.value and root.place_of(each).file == place.file}
        options = useful - beside - missing
        # two keys in one file mean different things, unless only a letter differs
        near = did_you_mean(key, options, cutoff=0.75) or did_you_mean(key, beside - missing, cutoff=0.95)
        if not near and (not is_task(cls) or root.value[key].value is None):
            continue  # a user's script may read any key, and null leaves out what an included recipe has
        longer = sorted(each for each in options if each.startswith(f"{key}_"))
        holder = next((name for name, node in root.value.items()
                       if isinstance(node.value, dict) and key in node.value), "")
        ours = NAMED_ELSEWHERE.get(key, "")
        given = not root.value[key].place.line  # on the command line
        if holder:
            hint = f"{holder} has a {key} of its own: " + (
                f"give --{holder}.{key}" if given else f"write `{key}: !ref <{key}>` there")
        elif ours and ours.partition(".")[0] in options | beside:
            hint = f"here its name is {ours}. {REMARKS.get(key, '')}".strip(" .")
        elif key in NEEDLESS:
            hint = f"leave it out: {NEEDLESS[key]}"
        elif near and not re.search(r"\d", key):
            hint = f"did you mean {' or '.join(longer if near in longer else [near])}?"
        else:
            hint = "leave it out: it has no effect"
        # Any code may read a key of a Brain that isn't sbkit's, by names that aren't seen here.
        if given and cls is not None and cls.__module__.startswith("sbkit."):
            findings.error("unread-key", Place(), f"--{key}",
                           "it would change nothing: nothing reads this key, and no reference names it", hint)
        elif holder and not given and not {*referred} - {*COPIED, ""}:  # what a run wrote, without references
            all_of = [node.value[key] for node in root.walk() if node is not root and isinstance(node.value, dict)
                      and key in node.value]
            acts = all_of[0]
            if len(all_of) == 1 and acts.scalar and acts.value != root.value[key].value:
                findings.warning("unread-key", place, key, f"it has no effect: {acts.key}, which has one, is "
                                 f"{acts.value}", f"change that (line {acts.place.line}) too")
        elif given or near or ours or key in NEEDLESS or {*referred} - {*COPIED, ""}:
            findings.warning("unread-key", place, key, "nothing reads this key, and no reference names it", hint)


def hparams_read(cls: type) -> tuple[set[str], set[str]]:
    """Attributes of ``self.hparams`` that the code of a Brain reads, and names that it passes to getattr or hasattr."""
    parts = [_hparams_read_in(base) for base in cls.__mro__]
    return {name for read, _ in parts for name in read}, {name for _, tested in parts for name in tested}


@functools.lru_cache(maxsize=64)
def _hparams_read_in(base: type) -> tuple[frozenset[str], frozenset[str]]:
    """The same for one class, cached because most recipes share it."""
    nothing: frozenset[str] = frozenset()
    if base.__module__.partition(".")[0] in ("speechbrain", "builtins") or base.__name__ == "Brain":
        return nothing, nothing  # SpeechBrain sets defaults for what it reads
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))))
    except (OSError, TypeError, SyntaxError):
        return nothing, nothing
    tested = frozenset(a.value for call in nodes if isinstance(call, ast.Call)
                       and getattr(call.func, "id", "") in ("getattr", "hasattr") for a in call.args
                       if isinstance(a, ast.Constant) and isinstance(a.value, str))
    read = frozenset(node.attr for node in nodes
                     if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
                     and isinstance(node.value, ast.Attribute) and node.value.attr == "hparams")
    return read - tested, tested
