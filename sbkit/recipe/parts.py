"""Parts of a model by their names in a recipe, such as ``CNN``, ``Transformer.encoder.layers.0.*`` or ``model.1``.

A key of the recipe means the module that it builds, wherever that is in the model; the path of a module below
``modules`` works too. Wildcards are those of fnmatch, and the name of a module includes everything below it.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.patterns import BY_PART, Patterns, flattened
from sbkit.recipe.report import Section, did_you_mean, listed
from sbkit.recipe.source import UNKNOWN, Findings, Node
from sbkit.recipe.values import static

FOR_GOOD = float("inf")
#: Modules by class, class name or path.
LayerNames = str | type | Iterable[str | type]


def trained_parts(parts: ParameterGroups, until: Mapping[str, float], factors: Mapping[str, float], peak: float | None,
            ) -> Section | None:
    """Make the table of trained parts; None if all are trained from the first step, at one rate.

    parts : all parameters, by their names in the recipe
    until : the optimizer step until which a parameter is frozen, by path; ``FOR_GOOD``: all steps
    factors : factors of the learning rate, by path; 1 if there is none
    peak : the highest learning rate of the run; None: unknown
    """
    if not until and not factors:
        return None
    sizes: dict[str, Counter[float]] = {}
    multiples: dict[str, set[float]] = {}
    distinct = {id(parameter): path for path, parameter in reversed(parts.parameters.items())}
    for path in filter(set(distinct.values()).__contains__, parts.parameters):
        part, begins = parts.name(path).partition(".")[0], until.get(path, 0)
        sizes.setdefault(part, Counter())[begins] += parts.parameters[path].numel()
        if begins < FOR_GOOD:
            multiples.setdefault(part, set()).add(factors.get(path, 1.0))
    rows = []
    for part, counts in sizes.items():
        scales = multiples.get(part, set())
        rates = [] if peak is None else [_range([peak * scale for scale in scales])]
        rows.append([part, f"{counts[0]:,}", ", ".join(_frozen(counts)), _range(scales), *rates])
    whole: Counter[float] = sum(sizes.values(), Counter())
    columns = ["part", "trained", "frozen", "rate factor", *([] if peak is None else ["peak rate"])]
    total, frozen = whole.total(), _frozen(whole)
    first = " from the first step" if any(0 < step < FOR_GOOD for step in whole) else ""
    summary = f"{whole[0]:,} of {total:,} parameters are trained{first} ({100 * whole[0] / max(1, total):.1f} %)"
    summary += f"; frozen: {' and '.join(frozen)}" if frozen else ""
    return Section("Trained parts", columns, rows, [summary], {
        "learn": whole[0], "frozen": {_when(step): count for step, count in sorted(whole.items()) if step}})


def _frozen(counts: Mapping[float, int]) -> list[str]:
    return [f"{count:,} {_when(step)}" for step, count in sorted(counts.items()) if step and count]


def _when(step: float) -> str:
    return f"until step {step:.0f}" if step < FOR_GOOD else "for good"


def _range(numbers: Iterable[float]) -> str:
    """Numbers as text: one, or the smallest and the largest."""
    ordered = sorted(numbers)
    return " to ".join(dict.fromkeys(f"{each:.3g}" for each in (ordered[:1] + ordered[-1:])))


T = TypeVar("T")


class ParameterGroups:
    """The parameters of some modules, by all their names.

    modules : the trained modules
    recipe : objects of the recipe by key, including modules
    tensors : tensors by path, instead of the modules' parameters
    """

    def __init__(self, modules: nn.Module, recipe: Mapping[str, Any], tensors: Mapping[str, Any] | None = None):
        keys = {id(value): key for key, value in recipe.items() if isinstance(value, nn.Module)}
        self._keyed = {path: keys[id(module)] for path, module in modules.named_modules(remove_duplicate=False)
                       if path and id(module) in keys}
        self.parameters = dict(modules.named_parameters(remove_duplicate=False) if tensors is None else tensors)
        self._ids = {path: id(parameter) for path, parameter in self.parameters.items()}
        self._names = [(name, path) for path in self.parameters for name in self.names(path)]

    def names(self, path: str) -> list[str]:
        """All names of the part with this path; if it belongs to a key of the recipe, the first begins with the key."""
        words = path.split(".")
        names = []
        for count in range(len(words), 0, -1):
            key = self._keyed.get(".".join(words[:count]))
            if key:
                names.append(".".join([key, *words[count:]]))
        if path not in names:
            names.append(path)
        return names

    def name(self, path: str) -> str:
        """The name of a path by the recipe's keys: ``Transformer.decoder`` for ``model.1.decoder``."""
        return self.names(path)[0]

    def matching(self, pattern: str) -> set[str]:
        """The paths of the parameters that match a pattern; a shared parameter has several."""
        below = f"{pattern}.*"
        ids = {self._ids[path] for name, path in self._names
               if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, below)}
        return {path for path, parameter_id in self._ids.items() if parameter_id in ids}

    def values_by_path(self, wanted: Mapping[str, T], key: str) -> dict[str, T]:
        """The values that patterns give to parameters, by path; the last matching one counts.

        wanted : values by pattern
        key : the key of the recipe with the patterns, for error messages
        """
        values: dict[str, T] = {}
        for pattern, value in flattened(wanted).items():
            paths = self.matching(pattern)
            if not paths:
                raise SbkitError("no-such-part", f"{key}: no trainable part is called {pattern!r}",
                                 hint=self.suggestion(pattern), key=key, value=pattern)
            values.update(dict.fromkeys(paths, value))
        return values

    def suggestion(self, pattern: str) -> str:
        """A hint with a name similar to a pattern that matches nothing."""
        split_names = [name.split(".") for name, _ in self._names]
        parts = {".".join(words[:count]) for words in split_names for count in range(1, len(words) + 1)}
        meant = did_you_mean(pattern.removesuffix(".*"), sorted(parts), cutoff=0.75)
        if meant:
            return f"did you mean {meant}?"
        tops = list(dict.fromkeys(words[0] for words in split_names))
        return f"parts are {listed(tops)}, and what is inside them"


def permanently_frozen(freeze: Mapping[str, Any] | None) -> dict[str, bool]:
    """The value of ``freeze`` at the end of a run, when only permanently frozen parts are frozen."""
    return {pattern: value is True for pattern, value in flattened(freeze or {}).items()}


def frozen_until(value: bool | int) -> float:
    """The optimizer step until which a part is frozen."""
    return FOR_GOOD if value is True else float(value)


def layers_called(modules: nn.Module, wanted: LayerNames, key: str) -> list[nn.Module]:
    """Return modules by class, class name or path (``*`` matches one part of a path), outer before inner ones.

    key : the recipe's key, for the error if an entry matches nothing
    """
    wanted = [wanted] if isinstance(wanted, (str, type)) else list(wanted)
    layers = {}
    missing = []
    for entry in wanted:
        hits = {id(module): module for path, module in modules.named_modules() if path and _fits(entry, path, module)}
        layers.update(hits)
        if not hits:
            missing.append(entry if isinstance(entry, str) else getattr(entry, "__name__", repr(entry)))
    if missing:
        repeated = sorted({type(m).__name__ for m in repeated_layers(modules)})
        near = did_you_mean(missing[0], [*repeated, *(path for path, _ in modules.named_modules())], cutoff=0.75)
        raise SbkitError("no-such-part", f"{key}: nothing under modules is called {', '.join(map(repr, missing))}",
                         hint=f"did you mean {near}?" if near else
                         f"name a class or a path; repeated layers: {', '.join(repeated) or 'none'}",
                         key=key, value=missing[0])
    return list(layers.values())


def _fits(entry: object, path: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    if any(kind.__name__ == entry for kind in type(module).__mro__):
        return True
    parts, wanted = path.split("."), str(entry).split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def repeated_layers(modules: nn.Module) -> list[nn.Module]:
    """Return the repeated layers: members of a ModuleList with several of the same class."""
    repeated: dict[int, nn.Module] = {}
    for module in modules.modules():
        if not isinstance(module, nn.ModuleList):
            continue
        kinds = [type(child) for child in module]
        for child in module:
            if kinds.count(type(child)) > 1 and any(p.requires_grad for p in child.parameters()):
                repeated[id(child)] = child
    return list(repeated.values())


# ---------------------------------------------------------------------------------------------- the check

def check_named(built: Built, modules: nn.Module, complete: bool, findings: Findings) -> None:
    """Check the keys that name parts, then freeze the parts that are never trained.

    complete : all modules of the recipe were built, so that a pattern without a match is a mistake
    """
    if "brain" not in built.nodes:  # a user's script may use these keys for something else
        return
    parts = ParameterGroups(modules, built.hparams)
    given = built.nodes["modules"].value if "modules" in built.nodes else {}
    tops = [] if complete else [*built.nodes, *(given if isinstance(given, dict) else ())]
    for key, allowed in BY_PART.items():
        node = built.nodes.get(key)
        if node is not None and built.hparams.get(key) is not None and \
                _check(node, key, allowed, parts, tops, findings):
            built.hparams[key] = None  # reported, and unusable for later checks
    for key in ("activation_checkpointing", "fsdp") if complete else ():
        if (named := built.hparams.get(key)) and isinstance(named, (str, type, Sequence)):
            try:
                layers_called(modules, named, key)
            except SbkitError as error:
                findings.report(error, built.place(key), key)
                built.hparams[key] = None  # the cost ignores it
    freeze = built.hparams.get("freeze")
    if not freeze or not complete:
        return
    frozen = parts.values_by_path(freeze, "freeze")
    trained = {path for path, parameter in parts.parameters.items() if parameter.requires_grad}
    if trained and all(frozen_until(frozen.get(path, False)) > 0 for path in trained):
        place, _ = built.nodes["freeze"].culprit()
        findings.error("not-trained", place, "freeze", "it freezes all parameters, so nothing trains in the first step",
                       "leave at least one layer unfrozen")
        built.hparams["freeze"] = None
        return
    for path, value in frozen.items():
        if value is True:
            parts.parameters[path].requires_grad_(False)


def _check(node: Node, key: str, allowed: Patterns, parts: ParameterGroups, tops: list[str],
           findings: Findings) -> bool:
    """Add findings about one of these keys; return whether there are any.

    tops : names with which those of parts begin, if a mistake elsewhere keeps the parts themselves from being built
    """
    before = len(findings)
    if not isinstance(node.value, dict):
        findings.error("setting", node.place, key, f"it must be {allowed}", f"write {key}: {{CNN: {allowed.example}}}")
        return True
    for pattern, place, child in _entries(node):
        value = static(child)
        if value is not UNKNOWN and not allowed.fits(value):
            findings.error("setting", place, f"{key}.{pattern}",
                           f"it is {value if not isinstance(value, Node) else value.tag!r}, and must be "
                           f"{allowed.values}")
        elif tops:
            top = pattern.partition(".")[0]
            if top not in tops and not set("*?[") & set(top):
                near = did_you_mean(top, tops, cutoff=0.75)
                findings.error("no-such-part", place, f"{key}.{pattern}", f"no part is called {top!r}",
                               f"did you mean {near}?" if near else "parts are named by keys of the recipe")
        elif not parts.matching(pattern):
            findings.error("no-such-part", place, f"{key}.{pattern}",
                           f"no trainable part is called {pattern!r}", parts.suggestion(pattern))
    return len(findings) > before


def _entries(node: Node, before: str = "") -> Iterable[tuple[str, Any, Node]]:
    for name, child in node.value.items():
        if isinstance(child.value, dict):
            yield from _entries(child, f"{before}{name}.")
        else:
            yield f"{before}{name}", node.place_of(name), child
