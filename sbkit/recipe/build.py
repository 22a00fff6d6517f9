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
            args, kwargs = [self.make(arg) for arg in positional], {key: self.make(arg) for key, arg in named.items()}
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
        self.findings, self.folder = findings, folder
        self.hparams: dict[str, Any] = {}
        self.nodes: dict[str, Node] = {}
        """Nodes by top-level key."""
        self.root = Node({}, Place(), "")
        """The mapping of these."""
        self.missing: set[str] = set()
        """Top-level keys that could not be built."""
        self._failed: set[Node] = set()
        self._origins: dict[int, tuple[object, Node]] = {}
        self._skipped: list[Callable[[], object]] = []

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
            for each in (self.nodes, self.hparams):
                each.pop(key, None)
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
            kwargs["checkpoints_dir"], args = self.folder, args[1:]
        name = getattr(target, "__name__", str(target))
        try:
            return target(*args, **kwargs)
        except SbkitError as error:
            place, key = node.culprit_of(error)
            self.findings.error(error.code, place, key, error.message.removeprefix(f"{node.key}: "), error.hint or "")
        except OSError as error:  # a file that doesn't exist yet, or no network
            self.findings.warning("not-built", *node.culprit(),
                                  f"{name} can't be built here: {_first(error)}",
                                  "objects that need it were not checked")
        except Exception as error:  # each constructor has its own errors for wrong arguments
            # The numbers, texts and lists among the arguments are likely causes.
            shown = [f"{key} {value!r}" for key, value in kwargs.items()
                     if all(isinstance(one, (bool, int, float, str, type(None)))
                            for one in (value if isinstance(value, (list, tuple)) else [value]))]
            hint, reason = f"it gets {listed(shown)}" if shown else "", _first(error)
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
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with tempfile.TemporaryDirectory(prefix="sbkit-check-") as folder:
            built = Built(findings, folder)
            built.build_all(root)
            yield built
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _first(error: BaseException) -> str:
    statement = ""
    if isinstance(error, AssertionError) and not str(error).strip():  # the asserted statement explains it
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines, statement = linecache.getlines(frame.filename)[(frame.lineno or 1) - 1:][:20], frame.line or ""
        for end in range(1, len(lines) + 1):  # it may span several lines
            with contextlib.suppress(SyntaxError):
                statement = ast.unparse(ast.parse(textwrap.dedent("".join(lines[:end]))))
                break
    return statement or first_line(error)
