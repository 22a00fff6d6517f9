"""Builds the objects of a resolved recipe, as HyperPyYAML would; for a check, with the line of each.

Names in the YAML are imported and called, including ``!apply:``, and can do anything that a program can.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import random
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from speechbrain.utils.checkpoints import Checkpointer
from torch import nn
from torch.overrides import TorchFunctionMode

from sbkit.errors import SbkitError, first_line
from sbkit.recipe.report import listed
from sbkit.recipe.signatures import arguments, kind_of, kind_wanted, locate
from sbkit.recipe.source import UNKNOWN, Findings, Node, Place
from sbkit.recipe.values import as_tuple, is_tuple, static

#: The most lines of source that a statement is looked for in.
_LONGEST_STATEMENT = 20
#: PyYAML's own tags, by the tags of HyperPyYAML that do the same.
_OF_PYYAML = {"!!python/object/apply": "!apply", "!!python/name": "!name", "!!python/module": "!module"}

_INIT_METHODS = frozenset(("uniform_", "normal_", "exponential_", "xavier_uniform_", "xavier_normal_",
                           "kaiming_uniform_", "kaiming_normal_"))
#: Functions of torch.nn.init that do more than fill a tensor.
_INIT_FUNCTIONS = ("orthogonal_", "trunc_normal_", "sparse_")


class _SkipInit(TorchFunctionMode):
    """Leaves weights uninitialised within it, because most of a check needs only shapes and devices."""

    def __init__(self, skipped: list[Callable[[], object]]) -> None:
        super().__init__()
        self.skipped = skipped

    def __torch_function__(self, func: Callable[..., Any], types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> object:
        if getattr(func, "__name__", "") in _INIT_METHODS:
            return self.skip(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def skip(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
        """Store a call, and return the tensor that it would fill."""
        self.skipped.append(functools.partial(func, *args, **kwargs))
        return args[0] if args else kwargs.get("tensor")


class _NotBuilt(Exception):
    """Raised for an object whose parts were not built; the reason is among the findings already."""


def objects(root: Node) -> dict[str, Any]:
    """Build the objects of a resolved recipe, by key.

    They are built in the order of the lines, arguments before what takes them, because random initial weights depend on
    it. Keys that begin with ``__``, such as ``__set_seed``, are built, and then left out.
    """
    builder = Builder()
    built = {key: builder.make(node) for key, node in root.value.items()}
    return {key: each for key, each in built.items() if not key.startswith("__")}


class Builder:
    """Builds each node once, so that all references to it are the same object."""

    def __init__(self) -> None:
        self._objects: dict[Node, object] = {}

    def make(self, node: Node) -> Any:  # of any class
        """The object of a node."""
        if node not in self._objects:
            self._objects[node] = self._make(node)
        return self._objects[node]

    def _make(self, node: Node) -> object:
        kind, _, name = node.tag.partition(":")
        kind = _OF_PYYAML.get(kind, kind)
        if kind in ("!new", "!apply", "!applyref", "!name", "!module"):
            try:
                target = locate(name)
            except LookupError as error:
                self.fail(node, "no-such-name", f"{node.tag} can't be found: {error.args[0]}", error.args[1])
            if node.tag.startswith(kind) and (wanted := kind_wanted(kind, target)):
                self.fail(node, "wrong-kind", f"{node.tag} is {kind_of(target)}", wanted)
            positional, named = arguments(node)
            args = [self.make(arg) for arg in positional]
            kwargs = {key: self.make(arg) for key, arg in named.items()}
            if kind in ("!new", "!apply", "!applyref"):
                return self.call(node, target, args, kwargs)
            return functools.partial(target, *args, **kwargs) if args or kwargs else target
        if isinstance(node.value, dict) and not node.tag:
            return {as_tuple(key) if is_tuple(key) else key: self.make(child) for key, child in node.value.items()}
        if isinstance(node.value, list) and node.tag in ("", "!!python/tuple"):
            items = [self.make(child) for child in node.value]
            return tuple(items) if node.tag else items
        value = static(node)
        if node.tag:
            self.fail(node, "unknown-tag", f"there is no tag {node.tag}")
        if value is UNKNOWN:
            self.fail(node, "tuple-as-text", f"{node.value!r} can't be read as a tuple")
        return value

    def call(self, node: Node, target: Callable[..., Any], args: list[Any], kwargs: dict[Any, Any]) -> object:
        """Call what the tag of a node names."""
        return target(*args, **kwargs)

    def fail(self, node: Node, code: str, message: str, hint: str = "") -> NoReturn:
        """End because of a mistake in a node."""
        raise SbkitError(code, f"{node.place}: {node.key}: {message}", hint=hint or None, key=node.key,
                         file=node.place.file if node.place.line else None, line=node.place.line or None)


class Built(Builder):
    """The objects of a recipe that is checked, by key, and the nodes from which they were built.

    They are built as in a run, except that a checkpointer gets a temporary folder, because a training may be writing
    into the recipe's, and that weights are only initialised if a check asks for it, which saves time.

    findings : gets errors of objects that can't be built
    folder : for checkpoints
    """

    def __init__(self, findings: Findings, folder: str) -> None:
        super().__init__()
        self.findings = findings
        self.folder = folder
        self.hparams: dict[str, Any] = {}
        self.nodes: dict[str, Node] = {}
        """Nodes by top-level key."""
        self.root = Node({}, Place(), "")
        """The mapping of these."""
        self.missing: set[str] = set()
        """Top-level keys that could not be built."""
        self._failed: set[Node] = set()
        self._origins: dict[int, tuple[object, Node]] = {}
        """By the id of an object: the object, which keeps its id from being used again, and the node it was built from.
        """
        self._skipped: list[Callable[[], object]] = []
        """The calls that initialise weights, in order."""

    def initialise(self) -> None:
        """Initialise the weights, which building skipped."""
        with torch.no_grad():
            while self._skipped:
                self._skipped.pop(0)()

    def place(self, key: str) -> Place:
        """The place of a key; without file and line if the recipe lacks it."""
        return self.nodes[key].place if key in self.nodes else Place()

    def origin(self, obj: object) -> Node | None:
        """The node that an object was built from, None if it is unknown."""
        found = self._origins.get(id(obj))
        return found[1] if found is not None and found[0] is obj else None

    def build_all(self, root: Node) -> None:
        self.root = root
        init = _SkipInit(self._skipped)
        functions: dict[str, Any] = {
            name: functools.partial(init.skip, getattr(nn.init, name)) for name in _INIT_FUNCTIONS}
        with init, mock.patch.multiple(nn.init, **functions):
            for key, node in root.value.items():
                if not isinstance(key, str):  # reported already
                    continue
                self.nodes[key] = node
                try:
                    self.hparams[key] = self.make(node)
                except _NotBuilt:
                    self.missing.add(key)
        for key in [key for key in self.nodes if key.startswith("__")]:
            self.nodes.pop(key)
            if key in self.hparams:  # it may be missing
                del self.hparams[key]
            self.missing.discard(key)

    def make(self, node: Node) -> Any:  # as documented
        """The object of a node; one that failed, or has a mistake that is reported already, isn't tried again."""
        if node in self._failed or self.findings.unusable(node):
            raise _NotBuilt
        new = node not in self._objects
        try:
            built = super().make(node)
        except _NotBuilt:
            self._failed.add(node)
            raise
        if new and (not node.scalar or node.tag):  # if several nodes are the same object, the first defines it
            self._origins.setdefault(id(built), (built, node))
        return built

    def call(self, node: Node, target: Callable[..., Any], args: list[Any], kwargs: dict[Any, Any]) -> object:
        """Call it; a failure becomes a finding."""
        if isinstance(target, type) and issubclass(target, Checkpointer):
            kwargs["checkpoints_dir"] = self.folder
            args = args[1:]  # the first positional argument is the recipe's folder
        name = getattr(target, "__name__", str(target))
        try:
            return target(*args, **kwargs)
        except SbkitError as error:
            place, key = node.culprit_of(error)
            self.findings.error(error.code, place, key, error.message.removeprefix(f"{node.key}: "), error.hint or "")
        except OSError as error:  # a file that doesn't exist yet, or no network
            self.findings.warning("not-built", *node.culprit(),
                                  f"{name} can't be built here: {_reason_of(error)}",
                                  "objects that need it were not checked")
        except Exception as error:  # each constructor has its own errors for wrong arguments
            shown = [f"{key} {value!r}" for key, value in kwargs.items() if _is_plain(value)]  # likely causes
            hint = f"it gets {listed(shown)}" if shown else ""
            reason = _reason_of(error)
            if isinstance(error, IndexError):
                reason = f"a list among them is too short ({reason})"
            if target is nn.ModuleList:  # torch's message changes with its versions
                reason = "modules is a list of layers, and this one holds lists"
                hint = "write its layers as one list within a list: [[!ref <a>, !ref <b>]]"
            self.fail(node, "not-built", f"{name} refuses its arguments: {reason}", hint)
        raise _NotBuilt

    def fail(self, node: Node, code: str, message: str, hint: str = "") -> NoReturn:
        """Add an error about a node."""
        self.findings.error(code, *node.culprit_named_in(message), message, hint)
        raise _NotBuilt


@contextlib.contextmanager
def build(root: Node, findings: Findings) -> Iterator[Built]:
    """Build everything without a known mistake; failures become findings with their lines."""
    state_of_python = random.getstate()
    state_of_numpy = np.random.get_state()
    state_of_torch = torch.get_rng_state()
    try:
        with tempfile.TemporaryDirectory(prefix="sbkit-check-") as folder:
            built = Built(findings, folder)
            built.build_all(root)
            yield built
    finally:
        random.setstate(state_of_python)
        np.random.set_state(state_of_numpy)
        torch.set_rng_state(state_of_torch)


def _is_plain(value: object) -> bool:
    """Whether an argument is a number, a text, true, false or null, or a list of such values."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(item, (bool, int, float, str, type(None))) for item in values)


def _reason_of(error: BaseException) -> str:
    """Why an object could not be built: the first line of the error's message, or the assertion that doesn't hold."""
    is_bare_assertion = isinstance(error, AssertionError) and not str(error).strip()
    statement = _asserted_statement(error) if is_bare_assertion else ""
    return statement or first_line(error)


def _asserted_statement(error: BaseException) -> str:
    """The source of the ``assert`` that failed, in one line; empty if its file can't be read.

    An assertion without a message, such as SpeechBrain's ``assert d_model % nhead == 0``, says nothing else of what was
    wrong. A traceback has only the first line of a statement, which may span several, so the source file is read.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = (frame.lineno or 1) - 1
    following_lines = linecache.getlines(frame.filename)[first:first + _LONGEST_STATEMENT]
    for count in range(1, len(following_lines) + 1):
        with contextlib.suppress(SyntaxError):  # it needs more lines
            return ast.unparse(ast.parse(textwrap.dedent("".join(following_lines[:count]))))
    return frame.line or ""
