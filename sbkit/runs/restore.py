"""Restores a run's recipe and trained model from its folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from speechbrain.utils.checkpoints import Checkpoint
from speechbrain.utils.run_opts import RunOptions

from sbkit.errors import SbkitError, summary
from sbkit.recipe import build as builder
from sbkit.recipe import load
from sbkit.recipe.arguments import make_importable
from sbkit.recipe.files import moved
from sbkit.recipe.load import Recipe, Transcribe
from sbkit.recipe.source import Node
from sbkit.runs import earlier_recipes, pretrained
from sbkit.runs.progress import read_progress
from sbkit.score.metric import Metric, Order
from sbkit.score.run_files import BUNDLE, EVALUATIONS, RECIPE, TESTED
from sbkit.score.weights import BEST, BEST_CHECKPOINT, LAST, ChosenWeights
from sbkit.train.averaging import EMA
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint.weights import weights_alone
from sbkit.train.checkpoint_average import load_average, weight_recoverables

if TYPE_CHECKING:
    from sbkit.compat.brain import Brain

logger = logging.getLogger(__name__)


def load_run(run: str | Path, device: str | torch.device | None = None, *, weights: ChosenWeights = BEST_CHECKPOINT,
             **run_opts: Any) -> tuple[Recipe, Brain]:
    """Load the recipe and the Brain of a run, with trained weights and modules in evaluation mode.

    >>> recipe, brain = load_run("results/ctc/en/1234", "cpu")  # doctest: +SKIP

    run : the ``output_folder`` of a run; it may have been moved
    device : as for a run; None for this machine's accelerator if it has one, otherwise the CPU
    weights : see ``take_weights``
    run_opts : run options, e.g. ``precision="bf16"``
    """
    recipe = read_run(run)
    brain = build(recipe, device, **run_opts)
    take_weights(brain, weights)
    return recipe, brain


def read_run(run: str | Path) -> Recipe:
    """Read the recipe of a run, with paths adapted to where the folder is now."""
    run = Path(run)
    path = run / RECIPE
    _require_run(run)
    line = path.read_text(encoding="utf-8").splitlines()[1:2]  # the header names the original recipe
    make_importable(Path(line[0].removeprefix("#").strip()) if line else path)
    tree = moved_recipe(path, run)
    try:
        hparams = builder.objects(tree)
    except Exception as error:
        raise SbkitError("recipe-not-loaded", f"{path} cannot be loaded: {summary(error)}",
                         hint="was it trained with your own code? add its folder to PYTHONPATH", file=path) from error
    if hparams.get("brain") is None:
        raise SbkitError("run-of-script", f"{run} was trained by a script, and this command needs the run of a task",
                         file=run, hint="sbkit export and sbkit evaluate take a script's run; "
                         "docs/tutorials/own-task.md makes a task of it")
    if hparams.get("checkpointer") is None:
        raise SbkitError("no-checkpoint", f"{path} has no checkpointer, so nothing that it trained was saved",
                         hint="train it again with one", file=path)
    recipe = Recipe(hparams, load.read_keys(hparams, path), tree)
    recipe.task.tokenizer(recipe.keys)  # loads the tokenizer and the like from the preparation
    return recipe


def _require_run(folder: Path) -> None:
    """Raise unless a folder is a run's; the message names a run that the folder lies in."""
    if folder.resolve().parent.name == EVALUATIONS and folder.is_dir() and not (folder / "save").exists():
        run = folder.resolve().parents[1]
        if (run / RECIPE).is_file():
            raise SbkitError("not-a-run",
                             f"{folder} has the results of a test, not a run",
                             hint=f"name the run's folder: {run}",
                             file=folder)
    if (folder / RECIPE).is_file():
        return
    code = "not-a-run" if folder.exists() else "no-such-path"
    problem = "does not exist"
    if folder.is_dir():
        problem = f"is not a run: it has no {RECIPE}"
    elif folder.exists():
        problem = "is not a folder"
    hint = "name the output_folder of a run"
    for parent in folder.resolve().parents[:2]:
        if (parent / RECIPE).is_file():
            hint = f"name the run's folder: {parent}"
            break
    raise SbkitError(code, f"{folder} {problem}", hint=hint, file=folder)


def warn_unfinished(recipe: Recipe) -> None:
    """Warn if a run is not finished, with its progress and a newest checkpoint that is not validated."""
    keys = recipe.keys
    progress = read_progress(keys.checkpointer, keys.epoch_counter)
    epochs = keys.epoch_counter.limit
    if not progress.steps_done or progress.finished_epochs >= epochs or (keys.folder / TESTED).exists():
        return
    newest = ""
    if progress.steps_in_epoch:
        newest = (f"; its newest checkpoint, {progress.steps_in_epoch} steps into epoch "
                  f"{progress.finished_epochs + 1}, is not validated, so only --checkpoint {LAST} uses it")
    logger.warning("%s has not finished: it has trained %d of %d epochs, %d steps%s. The same command resumes it",
                   keys.folder, progress.finished_epochs, epochs, progress.steps_done, newest)


def build(recipe: Recipe, device: str | torch.device | None = None, *, transcribe: Transcribe | None = None,
          **run_opts: Any) -> Brain:
    """Build the run's Brain in evaluation mode with freshly initialised weights, for ``take_weights`` to fill.

    transcribe : see ``Recipe.brain``
    """
    options = {"device": None if device is None else str(device), **run_opts}
    options = {name: value for name, value in options.items() if value is not None}
    checkpointer = Checkpointer.adopt(recipe.hparams["checkpointer"])
    assert checkpointer is not None, "read_run refuses a recipe without one"
    pretrained.load(recipe.keys.pretrainer, pretrained.saved_ids(checkpointer.recoverables.values()))

    # Nothing is trained: there are no optimizer, no generators and no log files to load. The Brain keeps no moving
    # average beside its weights, since ``take_weights`` makes the averages its weights.
    brain = recipe.brain(
        RunOptions(**options, overridden_args=set(options)), transcribe=transcribe, opt_class=None, ema=None,
        checkpointer=weights_alone(checkpointer, recipe.keys.moving_average))
    brain.modules.eval()
    return brain


def take_weights(brain: Brain, weights: ChosenWeights = BEST_CHECKPOINT) -> list[Checkpoint]:
    """Fill a Brain from its checkpoints; returns those that were used.

    weights : the initial ones, if they have a share, are not mixed in: ``MeanWithSource`` does it
    """
    checkpointer = brain.checkpointer
    order = order_of(checkpointer, brain.metric, weights.checkpoint)
    if weights.average.several:
        if weights.by_name:
            raise SbkitError("conflicting-options",
                             f"only the best or the last checkpoints can be averaged, not {weights.checkpoint}",
                             hint="name best or last, or leave --average out", key="average")
        if len(weight_recoverables(checkpointer)) < len(checkpointer.recoverables):  # the rest isn't averaged
            checkpointer.recover_if_possible(**order)
        return load_average(checkpointer, weights.average, **order)
    if weights.by_name:
        used = find_checkpoint(checkpointer, weights.checkpoint)
        checkpointer.load_checkpoint(used)
    else:
        used = checkpointer.recover_if_possible(**order)
    for obj in checkpointer.recoverables.values():
        if isinstance(obj, EMA):
            obj.module.load_state_dict(obj.state_dict()["weights"])
    return [used]


def order_of(checkpointer: Checkpointer, metric: Metric, checkpoint: str,
             requested: str = f"--checkpoint {LAST}") -> Order:
    """How to rank a run's checkpoints for ``checkpoint``: by the task's metric, or by time if empty.

    metric : of the task
    requested : how to request the newest instead, for the message
    """
    if not checkpointer.list_checkpoints():
        raise SbkitError("no-checkpoint", f"{checkpointer.checkpoints_dir} has no checkpoint",
                         hint="train it, or wait for its first checkpoint", file=checkpointer.checkpoints_dir)
    order = metric.order if checkpoint == BEST else Order()
    if order and not any(metric.name in ckpt.meta for ckpt in checkpointer.list_checkpoints()):
        raise SbkitError("not-validated",
                         f"no checkpoint in {checkpointer.checkpoints_dir} was validated, so none is the best by "
                         f"{metric.name}", hint=f"use the newest ({requested})", file=checkpointer.checkpoints_dir)
    return order


def find_checkpoint(checkpointer: Checkpointer, name: str) -> Checkpoint:
    """The checkpoint whose folder has this name, or the only one whose name contains it."""
    checkpoints = {Path(ckpt.path).name: ckpt for ckpt in checkpointer.list_checkpoints()}
    wanted = Path(name).name
    matching = [wanted] if wanted in checkpoints else [folder for folder in checkpoints if wanted in folder]
    if len(matching) == 1:
        return checkpoints[matching[0]]
    problem = f"there is no checkpoint {name!r}"
    if matching:
        problem = f"{len(matching)} checkpoints have {name!r} in their name"
    raise SbkitError("no-checkpoint", f"{problem} in {checkpointer.checkpoints_dir}",
                     hint=f"choose one of {', '.join(sorted(checkpoints))}, {BEST} or {LAST}",
                     file=checkpointer.checkpoints_dir, value=name)


def moved_recipe(path: Path, folder: Path, overrides: Mapping[str, Any] | None = None) -> Node:
    """The tree of a run's recipe, with paths in its old output folder moved to ``folder``."""
    tree = load.resolved(path, overrides or {})
    if tree.at("output_folder") is None:
        hint = "is it a recipe that a run wrote?"
        if (folder / BUNDLE).is_file():
            hint = "that is a bundle: name the run that it was exported from"
        raise SbkitError("not-a-run", f"{path} lacks output_folder", hint=hint, file=path)
    return moved(earlier_recipes.rename(tree), folder)
