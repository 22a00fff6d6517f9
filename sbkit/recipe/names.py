"""Top-level keys that code reads by name, and a check for keys of a recipe that have no effect."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from sbkit.recipe.elsewhere import NAMED_ELSEWHERE, NEEDLESS, REMARKS
from sbkit.recipe.files import COPIED, Files, keys
from sbkit.recipe.keys import Declared, is_task
from sbkit.recipe.overrides import named, unknown_key
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
    useful = {*declared(root), *RUN_OPTIONS, *read, *tested}
    useful |= {key for key in referred if key in root.value}
    useful |= _named_by_alias(root)
    reported = {finding.key for finding in findings}
    missing = read - set(root.value)  # each is reported with names that are similar to it
    unread = _UnreadKeys(root, cls, useful, missing | reported, has_references=bool({*referred} - {*COPIED, ""}))

    for key, node in root.value.items():
        if not isinstance(key, str) or key in useful | reported or key.startswith("__"):
            continue
        if node.tag.startswith("!apply"):  # calling it is its effect
            continue
        owner, dot, part = key.partition(".")
        if dot and owner in root.value:  # as on the command line, but a file is read as YAML
            inside = "".join(f"{{{name}: " for name in part.split(".")) + "..." + "}" * (part.count(".") + 1)
            findings.error("unread-key", root.place_of(key), key,
                           f"in a file this is a separate key, not a part of {owner}",
                           f"write it inside, {owner}: {inside}, or use --{key} on the command line")
            continue
        unread.report(key, findings)


def _named_by_alias(root: Node) -> set[str]:
    """The keys whose values an alias of YAML puts at other places, too."""
    holders = Counter(child for node in root.walk() for child in node.children())
    return {key for key, node in root.value.items() if holders[node] > 1}


class _UnreadKeys(NamedTuple):
    """What has to be known of a recipe to report its keys that nothing reads."""

    root: Node
    cls: type | None
    """The class under ``brain``."""
    useful: Collection[str]
    """Keys that something reads, whether the recipe has them or not."""
    reported: Collection[str]
    """Keys that are reported elsewhere, as missing or as wrong."""
    has_references: bool
    """Whether it has references, except those that a run's own recipe gets when it is read again."""

    def report(self, key: str, findings: Findings) -> None:
        """Report a key that nothing reads, unless code that isn't seen here may."""
        root = self.root
        place = root.place_of(key)
        on_command_line = not place.line
        near, hint = self._suggestion(key)
        if not near and (not is_task(self.cls) or root.value[key].value is None):
            return  # a user's script may read any key, and null leaves out what an included recipe has

        # Any code may read a key of a Brain that isn't sbkit's, by names that aren't seen here.
        is_ours = self.cls is not None and self.cls.__module__.startswith("sbkit.")
        if on_command_line and is_ours:
            findings.error("unread-key", Place(), f"--{key}",
                           "this key has no effect: nothing reads it, and no reference names it", hint)
        elif self._holder(key) and not on_command_line and not self.has_references:
            self._report_copy(key, findings)
        elif on_command_line or near or key in NAMED_ELSEWHERE or key in NEEDLESS or self.has_references:
            findings.warning("unread-key", place, key,
                             "this key has no effect: nothing reads it, and no reference names it", hint)

    def _holder(self, key: str) -> str:
        """The first key whose mapping has a key of this name; empty if there is none."""
        return next((name for name, node in self.root.value.items()
                     if isinstance(node.value, dict) and key in node.value), "")

    def _suggestion(self, key: str) -> tuple[str | None, str]:
        """A similar key that something reads, and what to do instead of writing this one."""
        root = self.root
        file = root.place_of(key).file
        on_command_line = not root.place_of(key).line
        in_same_file = {name for name in self.useful if name in root.value and root.place_of(name).file == file}
        elsewhere = {name for name in self.useful if name not in in_same_file and name not in self.reported}
        near = did_you_mean(key, elsewhere, cutoff=0.75)
        if not near:  # two keys in one file mean different things, unless only a letter differs
            near = did_you_mean(key, in_same_file.difference(self.reported), cutoff=0.95)

        holder = self._holder(key)
        ours = NAMED_ELSEWHERE.get(key, "")
        if holder:
            instead = f"give --{holder}.{key}" if on_command_line else f"write `{key}: !ref <{key}>` there"
            hint = f"{holder} has a {key} of its own: {instead}"
        elif ours and ours.partition(".")[0] in elsewhere | in_same_file:
            hint = f"here its name is {ours}. {REMARKS.get(key, '')}".strip(" .")
        elif key in NEEDLESS:
            hint = f"leave it out: {NEEDLESS[key]}"
        elif near and not re.search(r"\d", key):
            longer = sorted(name for name in elsewhere if name.startswith(f"{key}_"))
            hint = f"did you mean {' or '.join(longer if near in longer else [near])}?"
        else:
            hint = "leave it out"
        return near, hint

    def _report_copy(self, key: str, findings: Findings) -> None:
        """Report a key of a recipe that a run wrote, without references, if what has the effect has another value."""
        root = self.root
        acting = [node.value[key] for node in root.walk() if node is not root and isinstance(node.value, dict)
                  and key in node.value]
        if len(acting) == 1 and acting[0].scalar and acting[0].value != root.value[key].value:
            findings.warning("unread-key", root.place_of(key), key, f"it has no effect: {acting[0].key}, which has "
                             f"one, is {acting[0].value}", f"change that (line {acting[0].place.line}) too")


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
    calls = [node for node in nodes if isinstance(node, ast.Call)
             and getattr(node.func, "id", "") in ("getattr", "hasattr")]
    tested = frozenset(argument.value for call in calls for argument in call.args
                       if isinstance(argument, ast.Constant) and isinstance(argument.value, str))
    read = frozenset(node.attr for node in nodes
                     if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
                     and isinstance(node.value, ast.Attribute) and node.value.attr == "hparams")
    return read - tested, tested
