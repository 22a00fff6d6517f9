"""The nodes of a recipe, their places in its files, and findings about them.

A recipe goes through four stages. Each makes a tree of nodes of that of the one before; only resolving fills trees that
it has just had parsed:

1. parse (``files.py``): the text of each file as a tree, with the place of every key.
2. resolve (``resolve.py``): one tree of all files, with overrides applied and references replaced by their targets.
3. validate (``reading.py``): what can be seen in that tree without building it, as findings.
4. build (``build.py``): the objects.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.recipe.report import COMMAND_LINE, ERROR, WARNING, Finding

BASE = "recipe"
INCLUDE = "!include:"
REFERENCE = re.compile(r"<[^>]*>")


class _Unknown:
    """The value of a node that isn't known before the recipe is built."""

    def __repr__(self) -> str:
        return "a value known later"


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Place:
    """The place where something is written; by default the command line."""

    file: str = COMMAND_LINE
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}" if self.line else self.file


@dataclass(frozen=True, eq=False)
class Node:
    """A scalar, list or mapping of a YAML. Its list or mapping is filled by the stage that makes it, and then stays.

    ============  ============  ====================================================================================
    field         set by        what it holds
    ============  ============  ====================================================================================
    value         parsing       a Python value, a list of Nodes or a dict of Nodes; ``UNKNOWN`` if it is known only
                                when the recipe is built
    place         parsing       where it is written
    key           parsing       its full name for messages, such as ``CNN.strides[0]``
    tag           parsing       ``!new:torch.nn.Linear``, ``!ref``, ...; empty for plain data
    quoted        parsing       whether it is a text in quotes
    key_places    parsing       places of the keys of a mapping
    comments      parsing       comments by key or index: the lines above it, and the one after it; under None the
                                lines at a file's end
    dotted        command line  whether it is a mapping of parts that were given one by one, as by ``--a.b 1``
    whole         resolving     whether it is a plain mapping that replaces the whole value it overrides, since it was
                                written as a reference
    computed      resolving,    whether it was computed from references, or given on the command line
                  command line
    source        resolving     the scalar that it is a reference to
    reference     resolving     the text of the reference that became this scalar
    ============  ============  ====================================================================================
    """

    value: Any  # as its tag says
    place: Place
    key: str
    tag: str = ""
    quoted: bool = False
    key_places: dict[Any, Place] = field(default_factory=dict)
    comments: dict[Any, tuple[list[str], str]] = field(default_factory=dict)
    dotted: bool = False
    whole: bool = False
    computed: bool = False
    source: Node | None = None
    reference: str = ""

    def __post_init__(self) -> None:
        key = self.key
        while key.startswith(f"{BASE}."):  # keys under it are keys of the recipe
            key = key.removeprefix(f"{BASE}.")
        object.__setattr__(self, "key", key)

    def at(self, *keys: str) -> Any:  # as documented
        """The value under a key, or under nested keys; None if there is none."""
        value = self.value
        for key in keys:
            value = value[key].value if isinstance(value, dict) and key in value else None
        return value

    def place_of(self, key: object) -> Place:
        """The place of one of its keys; its own place if there is none."""
        return self.key_places.get(key, self.place)

    def key_of(self, key: object) -> str:
        """The full name of one of its keys or items."""
        if isinstance(self.value, list):
            return f"{self.key}[{key}]"
        return f"{self.key}.{key}" if self.key else str(key)

    def origin_of(self, key: object) -> tuple[Place, str]:
        """The place and full name of the origin of the value of one of its keys or items.

        That is the target of its reference, if that is a value in another file or on the command line; otherwise it is
        the key or item itself.
        """
        child = self.value.get(key) if isinstance(self.value, dict) else None
        while child is not None and child.source is not None:
            child = child.source
        here = self.place_of(key)
        if child is None or child.tag or child.place.file == here.file:
            return here, self.key_of(key)
        return child.place, child.key

    def culprit(self, named: Collection[object] = ()) -> tuple[Place, str]:
        """The place and full name to blame for an error that names some of its keys.

        A single key is to blame. With several or none, blame keys set on the command line, or else in another file; if
        there are none of these, the node itself.
        """
        keys = named or (self.value if isinstance(self.value, dict) else ())
        origins = list(dict.fromkeys(map(self.origin_of, keys)))
        if len(named) == 1:
            return origins[0]
        from_elsewhere = [(place, key) for place, key in origins if place.file != self.place.file]
        from_command_line = [(place, key) for place, key in from_elsewhere if place.file == COMMAND_LINE]
        to_blame = from_command_line or from_elsewhere
        if not to_blame:
            return self.place, self.key
        first_place, first_key = to_blame[0]
        return first_place, first_key if len(to_blame) == 1 else self.key

    def culprit_of(self, error: BaseException) -> tuple[Place, str]:
        """The place and full name to blame for an error about some of its keys.

        sbkit's own errors say which; the messages of other libraries are searched for names of keys.
        """
        if isinstance(error, SbkitError) and error.key is not None and isinstance(self.value, dict):
            named = [part for part in error.key.split(".") if part in self.value]
            if named:
                return self.culprit(named[:1])
        return self.culprit_named_in(error.message if isinstance(error, SbkitError) else str(error))

    def culprit_named_in(self, message: str) -> tuple[Place, str]:
        """The place and full name to blame for an error whose message mentions some of its keys."""
        words = set(re.split(r"[\s'`:\[\]]+", message))
        return self.culprit([key for key in self.value if key in words] if isinstance(self.value, dict) else ())

    @property
    def scalar(self) -> bool:
        return not isinstance(self.value, (dict, list))

    def items(self) -> list[tuple[Any, Node]]:
        """Its child nodes, by key or index."""
        if isinstance(self.value, dict):
            return list(self.value.items())
        return list(enumerate(self.value)) if isinstance(self.value, list) else []

    def children(self) -> list[Node]:
        return [child for _, child in self.items()]

    def walk(self) -> Iterator[Node]:
        """The node itself and all nodes inside it, each once."""
        seen = set[Node]()
        stack = [self]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                yield node
                stack.extend(reversed(node.children()))

    def mapped(self, change: Callable[[Node], Node]) -> Node:
        """The tree in which ``change`` has replaced each node, before what is inside it.

        A node that is at several places stays one, and one in which nothing changes stays the same.
        """
        return self.mapping(change)[self]

    def mapping(self, change: Callable[[Node], Node]) -> dict[Node, Node]:
        """By each node inside it, what ``mapped`` replaces that with."""
        replaced: dict[Node, Node] = {}

        def visit(node: Node) -> Node:
            if node in replaced:
                return replaced[node]
            changed = replaced[node] = change(node)  # before what is inside, which may be the node itself
            items = [(key, visit(child)) for key, child in changed.items()]
            if any(new is not old for (_, new), old in zip(items, changed.children(), strict=True)):
                value = dict(items) if isinstance(changed.value, dict) else [child for _, child in items]
                replaced[node] = dataclasses.replace(changed, value=value)
            return replaced[node]

        visit(self)
        return replaced

    def texts(self) -> dict[str, str]:
        """Each tag and value inside it as text, by full name; nodes with several names only by the shortest."""
        texts: dict[str, str] = {}
        waiting = deque([("", self)])
        seen = set[Node]()
        while waiting:
            name, node = waiting.popleft()
            if node in seen:
                continue
            seen.add(node)
            value = "null" if node.value is None else str(node.value) if node.scalar else ""
            if node.scalar and not (node.tag or value):
                value = "''"
            if text := f"{node.tag} {value}".strip():
                texts[name] = text
            in_list = isinstance(node.value, list)
            waiting.extend((f"{name}[{key}]" if in_list else f"{name}.{key}".lstrip("."), child)
                           for key, child in node.items())
        return texts


class Findings(list[Finding]):
    """What is found about a recipe, with a method to add each kind, and the nodes in which a mistake is reported.

    A mistake is reported once, where it is: what refers to a reported node, or takes it, isn't reported again.
    """

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        super().__init__(findings)
        self._reported: set[Node] = set()

    def error(self, code: str, place: Place, key: str, message: str, suggestion: str = "") -> None:
        """Add a finding that would end a run or make its results wrong."""
        self.append(Finding(ERROR, code, place.file, place.line, key, message, suggestion, place.column))

    def report(self, error: SbkitError, place: Place, key: str) -> None:
        """Add an error that was raised, with its own code; the key isn't repeated in the message."""
        self.error(error.code, place, key, error.message.removeprefix(f"{key}: "), error.hint or "")

    def wrong(self, node: Node, code: str, message: str, suggestion: str = "") -> None:
        """Add an error about a value, which is then reported."""
        self.error(code, node.place, node.key, message, suggestion)
        self.mark(node)

    def warning(self, code: str, place: Place, key: str, message: str, suggestion: str = "") -> None:
        """Add a finding that may be a mistake."""
        self.append(Finding(WARNING, code, place.file, place.line, key, message, suggestion, place.column))

    def mark(self, node: Node) -> None:
        """Note that a mistake in a node is reported."""
        self._reported.add(node)

    def is_reported(self, node: Node) -> bool:
        """Whether a mistake in a node is reported."""
        return node in self._reported

    def unusable(self, node: Node) -> bool:
        """Whether a node can't be built, because of a mistake in it, or in its source, that is reported."""
        return self.is_reported(node) or node.value is UNKNOWN or (
            node.source is not None and self.unusable(node.source))

    def blame(self, node: Node, key: object) -> Place:
        """Mark a node, the value of one of its keys and the target of that one's reference; return its origin."""
        self.mark(node)
        child = node.value.get(key) if isinstance(node.value, dict) else None
        while child is not None:
            self.mark(child)
            child = child.source
        return node.origin_of(key)[0]

    def replaced(self, node: Node, **changes: Any) -> Node:
        """A copy of a node with other values of some attributes, reported if the node is."""
        copied = dataclasses.replace(node, **changes)
        if self.is_reported(node):
            self.mark(copied)
        return copied

    def copied(self, node: Node) -> Node:
        """A copy of a node with all that it refers to, in which the copies of reported nodes are reported."""
        copies: dict[int, Any] = {}
        copied = copy.deepcopy(node, copies)
        reported = [node for node in self._reported if id(node) in copies]
        for original in reported:
            self.mark(copies[id(original)])
        return copied

    def mapped(self, root: Node, change: Callable[[Node], Node]) -> Node:
        """``root.mapped(change)``, in which what replaces a reported node is reported."""
        replaced = root.mapping(change)
        self._reported.update(new for old, new in replaced.items() if old in self._reported)
        return replaced[root]

    def include(self, others: Findings) -> None:
        """Add the findings about the same nodes of an earlier stage."""
        self.extend(others)
        self._reported |= others._reported

    @property
    def has_errors(self) -> bool:
        """Whether any of them is an error."""
        return any(finding.severity == ERROR for finding in self)

    def as_error(self) -> SbkitError:
        """All errors, of which there is at least one, as one: its code, file, line and key are those of the first."""
        errors = [finding for finding in self if finding.severity == ERROR]
        first = errors[0]
        messages = [f"{error.where}: {error.key and f'{error.key}: '}{error.message}" for error in errors]
        hints = dict.fromkeys(error.suggestion for error in errors if error.suggestion)
        return SbkitError(first.code, "; ".join(messages), hint="; ".join(hints) or None,
                          file=None if first.file == COMMAND_LINE else first.file, line=first.line or None,
                          key=first.key.removeprefix("--") or None)
