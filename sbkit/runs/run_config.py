"""What decides a run, as one value: nothing of the run is built before it is complete, and nothing changes it after."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils.run_opts import RunOptions

from sbkit.recipe import load
from sbkit.recipe.arguments import CommandLine
from sbkit.recipe.load import Recipe
from sbkit.recipe.on_demand import keys_on_demand
from sbkit.recipe.settings import check_accumulation
from sbkit.recipe.source import Findings, Node
from sbkit.runs.keys import TaskKeys
from sbkit.system.cores import Layout


@dataclass(frozen=True)
class RunConfig:
    """A recipe with the values that the command line, the corpus and the device decide.

    A stage that decides more, such as the preparation of a corpus, leads to another one (``deciding``). ``build`` is
    called once, when all is decided.
    """

    command: CommandLine
    """As it was typed."""
    device: torch.device
    tree: Node
    """The resolved recipe, with the values of ``overrides``."""
    decided: Mapping[str, Any] = field(default_factory=dict)
    """The values of keys that the corpus, or a measurement on the device, has decided."""
    cpu: Layout | None = None
    """How the run uses the cores of a CPU; None: as torch and torchrun have it."""

    @classmethod
    def of(cls, command: CommandLine, device: torch.device, tree: Node | None = None) -> RunConfig:
        """The run of a command line.

        tree : its resolved recipe, if that is known already
        """
        if tree is None:
            load.check_overrides(command.path, command.overrides)
            tree = load.resolved(command.path, command.overrides)
        check_accumulation(tree, command.run_opts, findings := Findings())
        if findings:
            raise findings.as_error()
        return cls(command, device, tree)

    def deciding(self, values: Mapping[str, Any]) -> RunConfig:
        """The same run with further values of keys, and the recipe resolved with them; other values refer to these."""
        if not values:
            return self
        decided = {**self.decided, **values}
        tree = load.resolved(self.path, {**self.command.overrides, **decided})
        return dataclasses.replace(self, tree=tree, decided=decided)

    def deciding_batch_size(self, max_batch_seconds: float) -> RunConfig:
        """The same run with a number for ``batching: max_batch_seconds: auto``."""
        batching = copy.deepcopy(self.overrides.get("batching", {}))  # it may be given as a whole, with a tag
        batching["max_batch_seconds"] = max_batch_seconds
        return self.deciding({"batching": batching})

    @property
    def path(self) -> Path:
        """The recipe's file."""
        return self.command.path

    @property
    def run_opts(self) -> RunOptions:
        """SpeechBrain's options from the command line."""
        return self.command.run_opts

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The values that replace those in the recipe's file: as typed, and as decided since."""
        return {**self.command.overrides, **self.decided}

    @property
    def whole_command(self) -> CommandLine:
        """A command line that gives all values, for another process that builds the same recipe."""
        return dataclasses.replace(self.command, overrides=self.overrides)

    @property
    def folder(self) -> Path:
        """The output folder; an error if the recipe has none."""
        return self.keys().folder

    def keys(self) -> TaskKeys:
        """The keys, for what is done before the model is built: an object is built when its key is first read."""
        keys: TaskKeys = keys_on_demand(self.path, self.overrides, self.tree)
        return keys

    def build(self) -> Recipe:
        """Build the objects of the recipe."""
        return load.build_recipe(self.path, self.overrides, self.tree)
