"""Trials: a recipe's Brain that takes steps on noise, to see what they need."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sbkit.data.augment import planned_seconds
from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.data.plan import Batching, Plan
from sbkit.recipe import arguments, batch_size, flops, load
from sbkit.recipe.cost import longest_utterance
from sbkit.recipe.parts import permanently_frozen
from sbkit.recipe.reading import read
from sbkit.recipe.source import Findings

#: Maximum number of buckets to try.
MAX_BUCKETS = 6


class Trial:
    """A Brain for trial steps on noise, and the sizes to try."""

    def __init__(self, brain: Any, durations: np.ndarray, device: torch.device, cache: Path):  # a task
        self.brain = brain
        self.device = device
        self.cache = cache
        self.batching = brain.keys.batching
        self.longest = float(durations.max())
        self.typical = flops.typical_seconds(durations)
        self.most_seconds = self.batching.most_seconds(self.longest)
        edges = Plan(durations, Batching(self.most_seconds, self.batching.step_seconds)).edges.tolist()
        buckets = np.unique(np.linspace(0, len(edges) - 1, MAX_BUCKETS).round().astype(int))
        self.edges = [round(edges[bucket], 2) for bucket in buckets]

    @property
    def device_name(self) -> str:
        """The name of the GPU, or ``cpu``."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)

    def batch(self, utterances: int, seconds: float) -> Batch:
        """Return a batch of noise, with a usual number of labels."""
        return self.brain.dummy_batch(utterances, seconds, noise=True).to(self.device)

    def fits(self, utterances: int, seconds: float) -> bool:
        """Return whether a step on such a batch fits into memory."""
        return self.brain.trainer.fits(self.batch(utterances, seconds))


@contextlib.contextmanager
def open_trial(request: arguments.CommandLine, device: torch.device) -> Iterator[Trial]:
    """Build the recipe's Brain in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="sbkit-tune-") as folder:
        recipe = load.open_recipe(request.path, {**request.overrides, "output_folder": folder})
        model = batch_size.model_of(recipe.keys.modules)  # before a Brain replaces layers with faster equivalents
        brain = recipe.brain(request.run_opts, output_folder=None, schedule=None, checkpointer=None,
                             freeze=permanently_frozen(recipe.keys.freeze))
        brain.on_fit_start()
        brain.open_step(brain.optimizer_step + 1)
        brain.trainer.freezing.train()
        durations = _durations(recipe, request, Path(folder))
        logger = logging.getLogger("sbkit.train.distributed.unreached")  # the run itself will warn of unused layers
        before = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield Trial(brain, durations, device, batch_size.result_file(model, recipe.keys, brain.precision, device))
        finally:
            logger.setLevel(before)


def _durations(recipe: load.Recipe, request: arguments.CommandLine, folder: Path) -> np.ndarray:
    """Return the durations in the prepared corpus, if there is one; otherwise all lengths up to the longest allowed.

    folder : the temporary output folder with which the recipe was opened
    """
    corpus = recipe.keys.corpus
    manifest = corpus.manifest_path("train") if hasattr(corpus, "manifest_path") else None
    if manifest is not None and manifest.is_relative_to(folder):  # it is below the recipe's own output folder
        root = read(request.path, request.overrides, Findings())
        output_folder = root.value.get("output_folder") if root is not None else None
        if output_folder is not None:
            manifest = Path(str(output_folder.value)) / manifest.relative_to(folder)
    if manifest is None or not manifest.exists():
        return np.linspace(1.0, longest_utterance(recipe.hparams), 200)
    return planned_seconds(recipe.hparams.get("augment"), Manifest.open_prepared(manifest).durations)
