"""Opens a run for export: its model, with the weights of the chosen checkpoint."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechbrain.core import Stage
from torch import Tensor, nn

from sbkit.data.columns import BatchColumns
from sbkit.errors import SbkitError, summary
from sbkit.export.exported import Exported
from sbkit.nn import adapters
from sbkit.recipe.load import Recipe, Transcribe
from sbkit.runs import evaluation_options, old_set, restore
from sbkit.runs.keys import Bundles, TaskKeys
from sbkit.score.weights import BEST_CHECKPOINT, ChosenWeights
from sbkit.train.averaging import EMA

logger = logging.getLogger(__name__)
Task = Any  # the Brain of a run, whose class this package can't import


@dataclass
class Trained:
    """A trained model in evaluation mode on the CPU in fp32, and what is known about it."""

    exported: Exported
    keys: TaskKeys
    facts: dict[str, Any]
    """Recipe, checkpoint and scores, for config.json."""
    search_class: type | None = None
    """The search that an evaluation's ``--beam`` builds; None: there is none."""


def open_run(run: str | Path, weights: ChosenWeights = BEST_CHECKPOINT, bundles: Bundles | None = None,
             accept_worse: bool = True) -> Trained:
    """Load the model of a run for export.

    bundles : opens the recogniser of a task whose model outputs audio
    accept_worse : see ``old_set.guard``
    """
    recipe = restore.read_run(Path(run))
    restore.warn_unfinished(recipe)
    brain = restore.build(recipe, "cpu", transcribe=_recogniser(recipe, bundles))
    used = restore.take_weights(brain, weights)
    old_test = old_set.guard(recipe, brain, weights, accept_worse)
    has_moving_average = any(isinstance(recoverable, EMA) for recoverable in brain.checkpointer.recoverables.values())
    facts = {"experiment": recipe.keys.experiment or "", **weights.facts(used), "moving_average": has_moving_average}
    if old_test:
        facts["old_test"] = old_test
    if weights.share is not None:
        facts["mean_with_start"] = weights.share
    elif len(used) == 1:  # the validation was of these weights
        facts["valid"] = {key: value for key, value in used[0].meta.items()
                          if key in ("epoch", brain.metric.name, "loss")}
    return of_brain(brain, Path(run), facts)


def _recogniser(recipe: Recipe, bundles: Bundles | None) -> Transcribe | None:
    """Open the recogniser that transcribes the output of a model that generates speech, if there still is one."""
    if bundles is None:
        return None
    try:
        return evaluation_options.open_recogniser(recipe, bundles)
    except SbkitError as error:  # its bundle may be gone
        logger.warning("The words that a recogniser writes for the model's audio are not compared: %s", error)
        return None


def of_brain(brain: Task, run: Path, facts: dict[str, Any]) -> Trained:
    """Open the model of a Brain that has its weights; ``run`` is the folder with its recipe."""
    for module in (*brain.modules.values(), *vars(brain.hparams).values()):
        if isinstance(module, nn.Module):
            module.float().eval()
    adapters.merge(brain.modules)
    exported = brain.exported(run)
    if exported is None:
        raise SbkitError("nothing-to-export", f"{type(brain).__name__} doesn't define what to export",
                         hint="define its method exported(run), as docs/how-to/extend.md shows")
    if exported.label_column is None:
        for column, labels in BatchColumns(brain.columns, brain.keys).classes.items():
            if set(labels) == set(exported.labels):
                exported.label_column = column
                break
    exported.forward = functools.partial(_forward, brain)
    parameters = sum(parameter.numel() for parameter in brain.modules.parameters())
    search_class = None if brain.transcriber is None else brain.transcriber.decoding.search_class
    return Trained(exported, brain.keys, {**facts, "parameters": parameters}, search_class)


def _forward(brain: Task, signal: Tensor, samples: int) -> Any:  # depends on the task
    """Run the task's forward on one padded waveform [S]."""
    try:
        return brain.compute_forward(brain.clip_batch(signal, samples), Stage.TEST)
    except Exception as error:
        raise SbkitError("needs-a-batch", "compute_forward fails on a recording alone, so the export can't be compared "
                         f"with it: {summary(error)}",
                         hint="give it what it needs in your task's method clip_batch") from error


