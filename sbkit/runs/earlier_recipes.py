"""The names that keys and arguments had in recipes of earlier versions, so that the runs of these still open.

A recipe that a user writes or names is refused with such a name, as with any unknown one. A run that is trained already
can't be asked to change: its ``hyperparams.yaml`` is the only description of its checkpoints.
"""

from __future__ import annotations

import dataclasses

from sbkit.recipe.overrides import from_python
from sbkit.recipe.source import Node

#: By the class that takes the arguments, the present name of each former one.
ARGUMENTS = {
    "Batching": {"least_steps": "min_steps"},
    "Chunks": {"left": "left_context", "ahead": "lookahead"},
    "Enhancer": {"ahead": "lookahead"},
    "FiniteScalars": {"books": "codebooks"},
    "Muon": {"of": "modules", "strength": "update_rms", "every": "orthogonalize_every"},
    "ResidualVectors": {"books": "codebooks"},
    "Schedule": {"rise": "max_rise_per_step", "unheard": "max_lr_at_chance"},
}
#: Keys of the recipe itself.
KEYS = {"most_decibels": "max_db"}


def rename(tree: Node) -> Node:
    """The tree of a run's resolved recipe in which its keys and arguments have their present names."""
    tree = _renamed(tree, KEYS)
    values = dict(tree.value)
    if tree.at("tensorboard"):  # it was a key beside the list of loggers
        values.setdefault("loggers", from_python(["tensorboard"], "loggers", tree.place))
    values.pop("tensorboard", None)
    return dataclasses.replace(tree, value=values).mapped(_with_present_arguments)


def _with_present_arguments(node: Node) -> Node:
    _, _, path = node.tag.partition(":")
    return _renamed(node, ARGUMENTS.get(path.rpartition(".")[2], {})) if path.startswith("sbkit.") else node


def _renamed(node: Node, names: dict[str, str]) -> Node:
    """Rename keys of a mapping, which stay where they are; one that is there under its present name wins."""
    if not isinstance(node.value, dict) or names.keys().isdisjoint(node.value):
        return node
    present = {names.get(key, key): value for key, value in node.value.items() if names.get(key) not in node.value}
    return dataclasses.replace(node, value=present)
