"""Top-level keys that the code reads by name, and those of a recipe that nothing reads, which have no effect."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

from speechbrain.utils.run_opts import RunOptions

from sbkit.recipe.includes import Files, keys, named
from sbkit.recipe.keys import Declared
from sbkit.recipe.report import did_you_mean
from sbkit.recipe.signatures import Outside, locate
from sbkit.recipe.source import Findings, Node

#: What declares the keys of every recipe that names a brain.
EVERY_TASK = "sbkit.tasks.keys.TaskKeys"
#: Keys that a Brain reads where they are there: adding one is no typo.
RUN_OPTIONS = tuple(name for name in RunOptions.__dataclass_fields__ if name != "overridden_args")


def brain_class(root: Node) -> type | None:
    """The class that a recipe names under ``brain``; None where there is none to look at."""
    brain = root.value.get("brain")
    if brain is None or brain.wrong or not brain.tag.startswith("!name:"):
        return None
    try:
        cls = locate(brain.tag[len("!name:"):])
    except LookupError:  # told with the name
        return None
    return cls if inspect.isclass(cls) else None


def declared(root: Node) -> Mapping[str, Declared]:
    """The keys that this class declares; of one that can't be looked at, those of every task."""
    if "brain" not in root.value:
        return {}
    declaring = getattr(brain_class(root), "Keys", None) or locate(EVERY_TASK)
    return declaring.declared()


def declared_in(files: Files, overrides: Mapping[str, Any], packages: tuple[str, ...] | None = None,
                ) -> Mapping[str, Declared]:
    """The same of a recipe of which nothing is resolved yet; none where its class can't be found.

    packages : as ``locate`` takes them; of a class outside of them, the keys of every task
    """
    try:
        name = named("brain", files, overrides)
        declaring = getattr(locate(name, packages), "Keys", None) if name else None
    except Outside:
        declaring = locate(EVERY_TASK)
    except LookupError:  # told with the name
        declaring = None
    return declaring.declared() if declaring is not None else {}


def unknown_overrides(files: Files, overrides: Mapping[str, Any], packages: tuple[str, ...] | None = None,
                      ) -> tuple[list[str], list[str]]:
    """Overrides of what a recipe neither writes nor its task declares, and the names that may have been meant.

    What a task declares and the recipe does not write has no parts that could be overridden one by one.
    """
    there = keys(files)
    new = [key for key in overrides if key not in there]
    declared = declared_in(files, overrides, packages) if new else {}
    unknown = [key for key in new if key not in declared or type(overrides[key]) is dict]
    return unknown, [name for name in (*filter(_is_text, there), *declared, *RUN_OPTIONS) if name not in unknown]


def _is_text(key: Any) -> bool:
    return isinstance(key, str)


def check_names(root: Node, referred: Collection[str], findings: Findings) -> None:
    """Warn of keys without any effect: nothing reads them, no reference names them, and they call nothing.

    referred: keys that the recipe's references name
    """
    if "brain" not in root.value:  # a script of one's own reads what it likes
        return
    cls = brain_class(root)
    read, asked = hparams_named(cls) if cls is not None else (set(), set())
    useful = set(declared(root)) | set(RUN_OPTIONS) | read | asked | {key for key in referred if key in root.value}
    told = {finding.key for finding in findings}
    lacking = read - set(root.value) | told  # told as missing, with what they're near to
    for key in root.value:
        if not isinstance(key, str) or key in useful | told or key.startswith("__"):
            continue
        if root.value[key].tag.startswith("!apply"):  # which has done its work
            continue
        place = root.place_of(key)
        beside = {each for each in useful if each in root.value and root.place_of(each).file == place.file}
        options = useful - beside - lacking
        # who writes both into one file means two things, save where a letter is the difference
        near = did_you_mean(key, options, cutoff=0.75) or did_you_mean(key, beside - lacking, cutoff=0.95)
        if not near and not hasattr(cls, "stand_in"):  # no task: a script of one's own reads what it likes
            continue
        longer = sorted(each for each in options if each.startswith(f"{key}_"))
        findings.warning("unread-key", place, key, "nothing reads this key, and no reference names it",
                         f"did you mean {' or '.join(longer if near in longer else [near])}?"
                         if near and not re.search(r"\d", key) else "leave it out: it has no effect")


def hparams_read(cls: type) -> set[str]:
    """Attributes of ``self.hparams`` that a Brain's own code reads without asking whether they're there."""
    read, asked = hparams_named(cls)
    return read - asked


def hparams_named(cls: type) -> tuple[set[str], set[str]]:
    """Attributes of ``self.hparams`` that a Brain's own code reads; names that it asks for by getattr or hasattr."""
    read: set[str] = set()
    asked_for: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("speechbrain", "builtins") or base.__name__ == "Brain":
            continue  # SpeechBrain sets its defaults itself
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        asked = {a.value for call in ast.walk(tree) if isinstance(call, ast.Call)
                 and getattr(call.func, "id", "") in ("getattr", "hasattr") for a in call.args
                 if isinstance(a, ast.Constant) and isinstance(a.value, str)}
        read |= {node.attr for node in ast.walk(tree)
                 if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
                 and isinstance(node.value, ast.Attribute) and node.value.attr == "hparams"} - asked
        asked_for |= asked
    return read, asked_for
