"""Names of saved tensors by the keys of the recipe that saved them, read from its text with nothing built.

What is ``2.weight`` in the file of a ModuleList is ``ctc_lin.weight`` where the list's third entry is that key's: so
two recipes that order their lists otherwise understand each other.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from sbkit.nn.adapters import LoRA
from sbkit.nn.pretrained.source import Settings
from sbkit.recipe.includes import tag_of

V = TypeVar("V")

_LISTS = ("ModuleList", "Sequential")
_ADAPTED, _ADAPTERS = "Adapted", ("LoRA", "Houlsby")
_RANK = inspect.signature(LoRA).parameters["rank"].default


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
        self._loras = [node for node in tree.values() if _kind(node) == "LoRA"]
        modules = tree.get("modules")
        self._modules = {id(node): name for name, node in modules.items()} if isinstance(modules, Mapping) else {}

    def is_made(self, name: str) -> bool:
        """Whether this is an object that the recipe builds."""
        return tag_of(self._saved.get(name)).startswith("!new:")

    def is_module(self, name: str) -> bool:
        """Whether this is one of the recipe's modules, or holds some."""
        node = _within(self._saved.get(name))[0]
        return node is not None and (id(node) in self._modules
                                     or any(id(inner) in self._modules for _, inner in _inside(node)))

    def averaged(self, name: str) -> bool:
        """Whether this is the moving average of something."""
        return name == "ema" and _argument(self._ema, "module", 0) is not None

    def named(self, name: str, state: Mapping[str, V]) -> dict[str, V]:
        """The same tensors by the recipe's names."""
        node, before = _within(_argument(self._ema, "module", 0) if self.averaged(name) else self._saved.get(name))
        return self._named(node, name, {key.removeprefix(before): value for key, value in state.items()})

    def _named(self, node: object, name: str, state: Mapping[str, V]) -> dict[str, V]:
        heads = self._heads(node, name)
        found = {}
        for key, value in state.items():
            prefix = max((each for each in heads if key.startswith(each)), key=len)
            found[f"{heads[prefix]}.{key[len(prefix):]}"] = value
        return found

    def _heads(self, node: object, name: str = "") -> dict[str, str]:
        """What stands in the recipe's names for the beginnings of those in a module."""
        own = self._keys.get(id(node)) or self._modules.get(id(node)) or name
        heads = {"": own, **dict(self._prefixes(node))}
        return {prefix: self._also.get(head, head) for prefix, head in heads.items()}

    # ------------------------------------------------------------ adapted models

    def base_folder(self, name: str) -> str:
        """Where a run has the base of what it saves under this name; empty where that rests on none."""
        node = self._saved.get(name)
        return str(_argument(node, "folder", 2)) if _kind(node) == _ADAPTED else ""

    def named_base(self, name: str, base: Mapping[str, V]) -> dict[str, V]:
        """The tensors of a base by the recipe's names."""
        node = _argument(self._saved.get(name), "base", 1)
        return self._named(_argument(node, "module", 0) if _kind(node) in _ADAPTERS else node, name, base)

    def lora_scale(self, layer: str) -> float | None:
        """By how much the recipe multiplies what a LoRA gives, at the layer that it calls so."""
        for node in self._loras:
            rank, alpha = _argument(node, "rank", 2), _argument(node, "alpha", 3)
            targets = _argument(node, "targets", 1)
            for prefix, head in self._heads(_argument(node, "module", 0)).items():
                path = f"{prefix}{layer.removeprefix(f'{head}.')}"
                if layer.startswith(f"{head}.") and any(fnmatch.fnmatchcase(path, str(target)) for target in
                                                        (targets if isinstance(targets, list) else [targets])):
                    rank = _RANK if rank is None else rank
                    return float(rank if alpha is None else alpha) / float(rank)
        return None

    def _prefixes(self, node: object, before: str = "") -> Iterator[tuple[str, str]]:
        for place, inner in _inside(node):
            if id(inner) in self._keys:
                yield f"{before}{place}.", self._keys[id(inner)]
            yield from self._prefixes(inner, f"{before}{place}.")


def encoders(tree: Mapping[str, Any]) -> dict[str, Settings]:
    """The configs of pretrained encoders that a run has kept, by the recipe's key."""
    found = {}
    for key, node in tree.items():
        source, folder = (_argument(node, name, place) for place, name in enumerate(("source", "folder")))
        made = tag_of(node).startswith("!new:") and (isinstance(source, str) or _kind(node) == "Encoder")
        if made and isinstance(folder, str) and (settings := Settings.kept(source, folder)) is not None:
            found[key] = settings
    return found


def _inside(node: object) -> Iterator[tuple[str, object]]:
    """What a module is made with, by the name that it is held under: a place in a list, or the argument's."""
    kind = _kind(node)
    if isinstance(node, Mapping) and tag_of(node).startswith("!new:"):
        modules = node.get("modules") if kind in _LISTS else None
        yield from _placed(modules) if isinstance(modules, list) else \
            ((str(name), inner) for name, inner in node.items())
    elif isinstance(node, list) and kind in _LISTS:
        yield from _placed(node[0] if kind == "ModuleList" and node and isinstance(node[0], list) else node)


def _placed(nodes: list[object]) -> Iterator[tuple[str, object]]:
    return ((str(place), inner) for place, inner in enumerate(nodes))


def _within(node: object) -> tuple[object, str]:
    """What an Adapted saves, and where that lies in it; of anything else that itself."""
    return (_argument(node, "model", 0), "model.") if _kind(node) == _ADAPTED else (node, "")


def _kind(node: object) -> str:
    """The class of what a recipe makes, without its module."""
    return tag_of(node).rpartition(".")[2] if tag_of(node).startswith("!new:") else ""


def _argument(node: object, name: str, place: int) -> Any:  # whatever the recipe says there
    """What something is made with, by its name or its place."""
    if isinstance(node, Mapping):
        return node.get(name)
    return node[place] if isinstance(node, list) and place < len(node) else None
