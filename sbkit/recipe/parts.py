"""Parts of a model by the names that a recipe has for them: ``CNN``, ``Transformer.encoder.layers.0.*``, ``model.1``.

A key of the recipe stands for the module that it builds, wherever that is in the model; the path of a module below
``modules`` will do as well. ``*`` and the like are fnmatch's, and what names a module means all that is below it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn

from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.choices import COUNT, POSITIVE
from sbkit.recipe.report import did_you_mean, listed
from sbkit.recipe.source import UNKNOWN, Findings, Node
from sbkit.recipe.values import static

T = TypeVar("T")


class Patterns(NamedTuple):
    """What a key may be that says something of parts: a mapping of patterns."""

    values: str
    fits: Callable[[Any], bool]

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, Mapping) and all(self.fits(each) for each in opened(value).values())

    def __str__(self) -> str:
        return f"a mapping of parts to {self.values}"


FREEZE = Patterns("true, false or a number of steps", lambda value: isinstance(value, bool) or value in COUNT)
FACTORS = Patterns("a number above 0", lambda value: value in POSITIVE)


class Parts:
    """The parameters of some modules, each by all its names.

    Arguments
    ---------
    modules : what is trained, by name
    recipe : objects by key, some of which are among the modules
    tensors : others by path, in the place of their parameters
    """

    def __init__(self, modules: nn.Module, recipe: Mapping[str, Any], tensors: Mapping[str, Any] | None = None):
        keys = {id(value): key for key, value in recipe.items() if isinstance(value, nn.Module)}
        self._keyed = {path: keys[id(module)] for path, module in modules.named_modules(remove_duplicate=False)
                       if path and id(module) in keys}
        self.parameters = dict(modules.named_parameters(remove_duplicate=False) if tensors is None else tensors)
        self._ids = {path: id(parameter) for path, parameter in self.parameters.items()}
        self._names = [(name, path) for path in self.parameters for name in self.names(path)]

    @classmethod
    def of_names(cls, tensors: Mapping[str, Any]) -> Parts:
        """Tensors that have one name each."""
        return cls(nn.ModuleDict(), {}, tensors)

    def names(self, path: str) -> list[str]:
        """All that something under this path may be called; the shortest begins with a key, where one stands for it."""
        words, found = path.split("."), []
        for count in range(len(words), 0, -1):
            if key := self._keyed.get(".".join(words[:count])):
                found.append(".".join([key, *words[count:]]))
        return [*found, *([] if path in found else [path])]

    def called(self, path: str) -> str:
        """What somebody who wrote the recipe would call it: ``Transformer.decoder`` for ``model.1.decoder``."""
        return self.names(path)[0]

    def matching(self, pattern: str) -> set[str]:
        """The paths of the parameters that a pattern means; one that layers share has a path in each."""
        below = f"{pattern}.*"
        ids = {self._ids[path] for name, path in self._names
               if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, below)}
        return {path for path, known in self._ids.items() if known in ids}

    def told(self, wanted: Mapping[str, T], key: str) -> dict[str, T]:
        """What patterns say of each parameter, by path; the last that fits counts. ``key``: of the recipe."""
        found: dict[str, T] = {}
        for pattern, value in opened(wanted).items():
            paths = self.matching(pattern)
            if not paths:
                raise SbkitError(f"{key}: nothing that can be trained is called {pattern!r}", hint=self.near(pattern))
            found.update(dict.fromkeys(paths, value))
        return found

    def near(self, pattern: str) -> str:
        """What may have been meant."""
        words = (name.split(".") for name, _ in self._names)
        known = {".".join(each[:count]) for each in words for count in range(1, len(each) + 1)}
        meant = did_you_mean(pattern.removesuffix(".*"), sorted(known), cutoff=0.75)
        tops = dict.fromkeys(name.partition(".")[0] for name, _ in self._names)
        return f"did you mean {meant}?" if meant else f"there are {listed(list(tops))}, and what is below them"


def opened(wanted: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Patterns and what they say; ``{a: {b: 1}}``, as ``--KEY.a.b 1`` makes it, is ``{a.b: 1}``."""
    found: dict[str, Any] = {}
    for name, value in wanted.items():
        found.update(opened(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value})
    return found


def for_good(freeze: Mapping[str, Any] | None) -> dict[str, bool]:
    """The same without what thaws: the training that a run comes to in the end."""
    return {pattern: value is True for pattern, value in opened(freeze or {}).items()}


def until(value: bool | int) -> float:
    """The optimizer step up to which a part is frozen."""
    return float("inf") if value is True else float(value)


# ---------------------------------------------------------------------------------------------- the check

#: Keys whose entries are told of one by one, each with its line.
BY_PART = {"freeze": FREEZE, "learning_rates": FACTORS}


def check_named(built: Built, modules: nn.Module, complete: bool, findings: Findings) -> None:
    """Tell of every pattern that fits nothing and of values that say nothing; freeze what never trains.

    complete : all of the recipe's modules are there
    """
    if "brain" not in built.nodes:  # a script of one's own may mean something else by these keys
        return
    parts = Parts(modules, built.hparams)
    for key, allowed in BY_PART.items():
        node = built.nodes.get(key)
        if node is not None and built.hparams.get(key) is not None and \
                _check(node, key, allowed, parts if complete else None, findings):
            built.hparams[key] = None  # told, and nothing to go on with
    freeze = built.hparams.get("freeze")
    if not freeze or not complete:
        return
    told = parts.told(freeze, "freeze")
    trained = {path for path, parameter in parts.parameters.items() if parameter.requires_grad}
    if trained and all(until(told.get(path, False)) > 0 for path in trained):
        node = built.nodes["freeze"]
        findings.error("not-trained", node.place, "freeze", "it leaves nothing to train in the first step",
                       "leave at least one layer unfrozen")
        built.hparams["freeze"] = None
        return
    for path, value in told.items():
        if value is True:
            parts.parameters[path].requires_grad_(False)


def _check(node: Node, key: str, allowed: Patterns, parts: Parts | None, findings: Findings) -> bool:
    """Whether something is wrong."""
    before = len(findings)
    if not isinstance(node.value, dict):
        findings.error("setting", node.place, key, f"it must be {allowed}", f"write {key}: {{CNN: {_example(key)}}}")
        return True
    for pattern, place, child in _entries(node):
        value = static(child)
        if value is not UNKNOWN and not allowed.fits(value):
            findings.error("setting", place, f"{key}.{pattern}",
                           f"it is {value if not isinstance(value, Node) else value.tag!r}, and must be "
                           f"{allowed.values}")
        elif parts is not None and not parts.matching(pattern):
            findings.error("no-such-part", place, f"{key}.{pattern}",
                           f"nothing that can be trained is called {pattern!r}", parts.near(pattern))
    return len(findings) > before


def _entries(node: Node, before: str = "") -> Iterable[tuple[str, Any, Node]]:
    for name, child in node.value.items():
        if isinstance(child.value, dict):
            yield from _entries(child, f"{before}{name}.")
        else:
            yield f"{before}{name}", node.place_of(name), child


def _example(key: str) -> str:
    return "true" if key == "freeze" else "0.1"
