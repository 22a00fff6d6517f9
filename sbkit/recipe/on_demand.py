"""The keys of a recipe for what is done before its values are final: an object is built when its key is first read.

A corpus is prepared before the model is built, since it may decide the model's sizes. Preparing it reads few keys, and
which ones only the task knows. So nothing else is built for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from sbkit.recipe.build import Builder
from sbkit.recipe.keys import TaskKeys
from sbkit.recipe.load import building, declaring_class, mistakes, refuse_problems
from sbkit.recipe.signatures import locate
from sbkit.recipe.source import Node

#: Tags whose objects are built, or of which something is called; what is only named costs nothing.
_CALLS = "!new:", "!apply", "!!python/object"


def keys_on_demand(path: Path, overrides: Mapping[str, Any], tree: Node) -> TaskKeys:
    """The keys of a resolved recipe, each built when it is first read; ``vars`` has only those that are built.

    Scalars, lists and the corpus are there from the beginning. Its checkpointer lists checkpoints, and saves nothing,
    because what it would save is the model.

    path, overrides : what it was resolved from, for error messages
    """
    nodes = {key: node for key, node in tree.value.items() if not str(key).startswith("__")}
    if "checkpointer" in nodes:
        nodes["checkpointer"] = _saving_nothing(nodes["checkpointer"])
    builder = _FactsBuilder()

    def build(node: Node) -> Any:  # of any class
        with building(path, overrides):
            return builder.make(node)

    at_once = {"brain", "corpus", *(key for key, node in nodes.items() if not _calls_something(node))}
    values = {key: build(node) for key, node in nodes.items() if key in at_once}

    declared = declaring_class(values, tree.value, path)
    if problems := [*declared.wrong(values), *declared.null(values)]:
        found = mistakes(path, overrides)  # which names the command line, too
        if found.has_errors:
            raise found.as_error()
        refuse_problems(problems, path)

    later = {key: node for key, node in nodes.items() if key not in values}

    def property_of(node: Node) -> functools.cached_property[Any]:
        def value(keys: TaskKeys) -> Any:  # of any class
            return build(node)

        return functools.cached_property(value)

    def class_of(keys: TaskKeys, name: str) -> type:
        node = later.get(name)
        named = locate(node.tag.removeprefix("!new:")) if node is not None and node.tag.startswith("!new:") else None
        return named if isinstance(named, type) else type(getattr(keys, name))

    # A property of the derived class comes before the default that the base class has under the same name.
    members: dict[str, Any] = {key: property_of(node) for key, node in later.items()}
    members["built_later"] = frozenset(later)
    members["class_of"] = class_of
    # Declarations are cached by class, and this class, with all that it builds, must not outlive its keys.
    members["declared"] = classmethod(lambda cls: declared.declared())
    on_demand: Any = type(declared.__name__, (declared,), members)  # a class that is made here
    return on_demand.read(values)


class _FactsBuilder(Builder):
    """Builds an object without memory for its weights, if its class says that its facts are all that is asked.

    Such is a pretrained encoder: preparing asks how long an utterance it takes, and checks its files. With its weights,
    which the run's own encoder gets later, it would take seconds and gigabytes.
    """

    def call(self, node: Node, target: Callable[..., Any], args: list[Any], kwargs: dict[Any, Any]) -> object:
        if not getattr(target, "has_facts_without_weights", False):
            return super().call(node, target, args, kwargs)
        with torch.device("meta"):
            return super().call(node, target, args, kwargs)


def _calls_something(node: Node) -> bool:
    return any(inner.tag.startswith(_CALLS) for inner in node.walk())


def _saving_nothing(checkpointer: Node) -> Node:
    """The node of a checkpointer without what it saves."""
    if isinstance(checkpointer.value, dict):
        kept = {key: node for key, node in checkpointer.value.items() if key != "recoverables"}
        return dataclasses.replace(checkpointer, value=kept)
    if isinstance(checkpointer.value, list):
        return dataclasses.replace(checkpointer, value=checkpointer.value[:1])
    return checkpointer
