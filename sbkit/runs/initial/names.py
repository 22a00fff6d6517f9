"""Names of saved tensors by the keys of the recipe that saved them, read from its text with nothing built.

What is ``2.weight`` in the file of a ModuleList is ``ctc_lin.weight`` where the list's third entry is that key's: so
two recipes that order their lists otherwise understand each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from sbkit.recipe.includes import tag_of

V = TypeVar("V")

_LISTS = ("ModuleList", "Sequential")


class SavedNames:
    """What a recipe calls the parts of what it saves.

    Arguments
    ---------
    tree : the recipe's keys, references resolved: what two refer to is one object
    saved : what is saved, by name
    also : other names of keys
    """

    def __init__(self, tree: Mapping[str, Any], saved: Mapping[str, Any], also: Mapping[str, str] | None = None):
        self._saved, self._also, self._ema = saved, dict(also or {}), tree.get("ema")
        self._keys = {id(node): key for key, node in tree.items() if tag_of(node).startswith("!new:")}
        modules = tree.get("modules")
        self._modules = {id(node): name for name, node in modules.items()} if isinstance(modules, Mapping) else {}

    def is_made(self, name: str) -> bool:
        """Whether this is an object that the recipe builds."""
        return tag_of(self._saved.get(name)).startswith("!new:")

    def is_module(self, name: str) -> bool:
        """Whether this is one of the recipe's modules, or holds some."""
        node = self._saved.get(name)
        return node is not None and (id(node) in self._modules
                                     or any(id(inner) in self._modules for _, inner in _inside(node)))

    def averaged(self, name: str) -> str:
        """Of what this is the moving average; empty where it is none."""
        module = self._ema.get("module") if name == "ema" and isinstance(self._ema, Mapping) else None
        return next((other for other, node in self._saved.items() if node is module), "") if module is not None else ""

    def named(self, name: str, state: Mapping[str, V]) -> dict[str, V]:
        """The same tensors by the recipe's names."""
        node = self._saved.get(name)
        prefixes = dict(self._prefixes(node))
        base = self._keys.get(id(node)) or self._modules.get(id(node)) or name
        found = {}
        for key, value in state.items():
            prefix = max((each for each in prefixes if key.startswith(each)), key=len, default="")
            head = prefixes.get(prefix, base)
            found[f"{self._also.get(head, head)}.{key[len(prefix):]}"] = value
        return found

    def _prefixes(self, node: Any, before: str = "") -> Iterator[tuple[str, str]]:
        for place, inner in _inside(node):
            if id(inner) in self._keys:
                yield f"{before}{place}.", self._keys[id(inner)]
            else:
                yield from self._prefixes(inner, f"{before}{place}.")


def _inside(node: Any) -> Iterator[tuple[str, Any]]:
    """What a module is made with, by the name that it is held under: a place in a list, or the argument's."""
    kind = tag_of(node).rpartition(".")[2]
    if isinstance(node, Mapping) and tag_of(node).startswith("!new:"):
        modules = node.get("modules") if kind in _LISTS else None
        yield from _placed(modules) if isinstance(modules, list) else \
            ((str(name), inner) for name, inner in node.items())
    elif isinstance(node, list) and kind in _LISTS:
        yield from _placed(node[0] if kind == "ModuleList" and node and isinstance(node[0], list) else node)


def _placed(nodes: list[Any]) -> Iterator[tuple[str, Any]]:
    return ((str(place), inner) for place, inner in enumerate(nodes))
