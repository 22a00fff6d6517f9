"""Maps names of saved tensors to the keys of the recipe that saved them, from the recipe's text, without building it.

``2.weight`` in the file of a ModuleList becomes ``ctc_lin.weight`` if the list's third entry has that key, so recipes
with different orders of modules are compatible.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from sbkit.nn.adapters import LoRA
from sbkit.nn.pretrained.source import Settings
from sbkit.nn.pretrained.tensors import renamed
from sbkit.recipe.source import Node
from sbkit.recipe.values import data

V = TypeVar("V")

_LISTS = ("ModuleList", "Sequential")
#: SpeechBrain's wrappers of transformers' encoders, and the name in recipes here of the wrapped model.
_WRAPPERS = ("Wav2Vec2", "HuBERT", "WavLM")
_HELD_AS = "encoder.network"
_ADAPTED = "Adapted"
_ADAPTERS = ("LoRA", "Houlsby")
_DEFAULT_RANK = inspect.signature(LoRA).parameters["rank"].default


class SavedNames:
    """A recipe's names for the parts of saved objects.

    tree : the recipe with references resolved; two references to one object are one node
    saved : the saved objects, by name
    also : other names of keys
    """

    def __init__(self, tree: Node, saved: Mapping[str, Node], also: Mapping[str, str] | None = None):
        self._saved = saved
        self._also = dict(also or {})
        self._ema = tree.value.get("ema")
        self._keys = {id(node): key for key, node in tree.value.items() if _kind(node)}
        self._loras = [node for node in tree.children() if _kind(node) == "LoRA"]
        modules = tree.at("modules")
        self._modules = {id(node): name for name, node in modules.items()} if isinstance(modules, dict) else {}

    def is_made(self, name: str) -> bool:
        """Whether the recipe builds this object."""
        return _kind(self._saved.get(name)) != ""

    def is_module(self, name: str) -> bool:
        """Whether this is one of the recipe's modules, or contains some."""
        node = _within(self._saved.get(name))[0]
        return node is not None and (id(node) in self._modules
                                     or any(id(inner) in self._modules for _, inner in _inside(node)))

    def is_moving_average(self, name: str) -> bool:
        """Whether this is a moving average."""
        return name == "ema" and _argument(self._ema, "module", 0) is not None

    def named(self, name: str, state: Mapping[str, V]) -> dict[str, V]:
        """Rename a state's tensors to the recipe's names."""
        saved = _argument(self._ema, "module", 0) if self.is_moving_average(name) else self._saved.get(name)
        node, before = _within(saved)
        return self._named(node, name, {key.removeprefix(before): value for key, value in state.items()})

    def _named(self, node: Node | None, name: str, state: Mapping[str, V]) -> dict[str, V]:
        heads = self._heads(node, name)
        by_recipe_name = {}
        for key, value in state.items():
            prefix = max((head for head in heads if key.startswith(head)), key=len)
            rest = key[len(prefix):]
            if heads[prefix] == _HELD_AS:
                rest = renamed(rest)
            by_recipe_name[f"{heads[prefix]}.{rest}"] = value
        return by_recipe_name

    def _heads(self, node: Node | None, name: str = "") -> dict[str, str]:
        """Map prefixes of a module's tensor names to the recipe's keys."""
        key = self._keys.get(id(node)) or self._modules.get(id(node)) or name
        heads = {"": key, **dict(self._prefixes(node))}
        return {prefix: self._also.get(head, head) for prefix, head in heads.items()}

    # ------------------------------------------------------------ adapted models

    def base_folder(self, name: str) -> str:
        """The folder of an adapted model's base; empty without a base."""
        node = self._saved.get(name)
        return str(_value(node, "folder", 2)) if _kind(node) == _ADAPTED else ""

    def named_base(self, name: str, base: Mapping[str, V]) -> dict[str, V]:
        """Rename a base's tensors to the recipe's names."""
        node = _argument(self._saved.get(name), "base", 1)
        return self._named(_argument(node, "module", 0) if _kind(node) in _ADAPTERS else node, name, base)

    def lora_scale(self, layer: str) -> float | None:
        """The recipe's scale of the LoRA at a layer; None without one."""
        for node in self._loras:
            targets = _value(node, "targets", 1)
            patterns = [str(target) for target in (targets if isinstance(targets, list) else [targets])]
            for prefix, head in self._heads(_argument(node, "module", 0)).items():
                path = f"{prefix}{layer.removeprefix(f'{head}.')}"
                if layer.startswith(f"{head}.") and any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
                    rank = _value(node, "rank", 2)
                    alpha = _value(node, "alpha", 3)
                    rank = _DEFAULT_RANK if rank is None else rank
                    return float(rank if alpha is None else alpha) / float(rank)
        return None

    def _prefixes(self, node: Node | None, before: str = "") -> Iterator[tuple[str, str]]:
        if _kind(node) in _WRAPPERS:
            yield f"{before}model.", _HELD_AS
        for place, inner in _inside(node):
            if id(inner) in self._keys:
                yield f"{before}{place}.", self._keys[id(inner)]
            yield from self._prefixes(inner, f"{before}{place}.")


def encoders(tree: Node) -> dict[str, Settings]:
    """The configs of pretrained encoders that a run saved, by the recipe's key."""
    settings_by_key = {}
    for key, node in tree.value.items():
        source = _value(node, "source", 0)
        folder = _value(node, "folder", 1)
        is_encoder = _kind(node) and (isinstance(source, str) or _kind(node) == "Encoder")
        if not is_encoder or not isinstance(folder, str):
            continue
        settings = Settings.kept(source, folder)
        if settings is not None:
            settings_by_key[key] = settings
    return settings_by_key


def wrapped(tree: Node) -> str | None:
    """The folder or repository of the encoder in one of SpeechBrain's wrappers."""
    sources = (_value(node, "source", 0) for node in tree.value.values() if _kind(node) in _WRAPPERS)
    return next((source for source in sources if isinstance(source, str)), None)


def _inside(node: Node | None) -> Iterator[tuple[str, Node]]:
    """Yield the arguments of a module by the name of the submodule: an index in a list, or the argument's name."""
    kind = _kind(node)
    if node is None or not kind:
        return
    first = _argument(node, "modules", 0) if kind in _LISTS else None
    made_with = node.value if first is None or first.tag or not isinstance(first.value, list) else first.value
    if isinstance(made_with, dict):
        yield from ((str(name), inner) for name, inner in made_with.items())
    elif isinstance(made_with, list) and kind in _LISTS:
        yield from ((str(place), inner) for place, inner in enumerate(made_with))


def _within(node: Node | None) -> tuple[Node | None, str]:
    """The model that an Adapted saves, and its prefix there; for anything else the node itself."""
    return (_argument(node, "model", 0), "model.") if _kind(node) == _ADAPTED else (node, "")


def _kind(node: Node | None) -> str:
    """The class name of an object of the recipe; empty for other values."""
    return node.tag.rpartition(".")[2] if node is not None and node.tag.startswith("!new:") else ""


def _argument(node: Node | None, name: str, place: int) -> Node | None:
    """An argument of an object, by name or position; None also if it is null."""
    arguments = None if node is None else node.value
    argument = None
    if isinstance(arguments, dict):
        argument = arguments.get(name)
    elif isinstance(arguments, list) and place < len(arguments):
        argument = arguments[place]
    return None if argument is None or argument.value is None else argument


def _value(node: Node | None, name: str, place: int) -> Any:  # whatever the recipe says there
    """An argument of an object as a Python value."""
    argument = _argument(node, name, place)
    return None if argument is None else data(argument)
