"""Training of a prepared run: loaders from the plan, fit, and the final test."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.compat.brain import Brain
from sbkit.data.augment import Augment
from sbkit.data.columns import BatchColumns
from sbkit.data.loader import EvalLoader, TrainLoader
from sbkit.data.manifest import Manifest
from sbkit.data.plan import Plan
from sbkit.data.reader import SupportsEncode
from sbkit.data.splits import SPLITS
from sbkit.errors import SbkitError
from sbkit.recipe.arguments import CommandLine
from sbkit.recipe.load import Recipe
from sbkit.recipe.source import Findings, Node, Place
from sbkit.runs import evaluation_options, initial, old_set, restore, trained_on
from sbkit.runs.feeding import pad_to_shapes, utilisation, warn_of_slow_reading
from sbkit.runs.keys import Bundles, TaskKeys
from sbkit.runs.progress import last_logged_step, read_progress, warn_of_lost_steps
from sbkit.runs.run_config import RunConfig
from sbkit.runs.start_guard import StartGuard
from sbkit.system.console import counted
from sbkit.system.environment import command, describe
from sbkit.train.checkpoint.state import OtherModel
from sbkit.train.distributed import ranks
from sbkit.train.early_stopping import keys_to_raise
from sbkit.train.monitor.metrics import MetricsLog

logger = logging.getLogger(__name__)


def fit_and_test(recipe: Recipe, config: RunConfig, manifests: Mapping[str, Manifest], guard: StartGuard,
                 bundles: Bundles, results_folder: Path) -> Brain:
    """Train the remaining epochs, then test; returns the Brain, which has the results.

    bundles : opens the recogniser for the task's tests
    results_folder : the folder of the test's results
    """
    keys = recipe.keys
    device = config.device
    test_only = config.run_opts.test_only
    logs = ranks.is_main() and not test_only  # about training
    train = keys.rows_of_training(manifests["train"])
    tokenizer = recipe.task.tokenizer(keys)
    columns = BatchColumns(recipe.task.columns, keys)
    brain = recipe.brain(config.run_opts, transcribe=evaluation_options.open_recogniser(recipe, bundles))

    progress = ranks.run_on_main(read_progress, brain.checkpointer, keys.epoch_counter)
    rounding = keys.batching.rounding(device.type, brain.compile)
    plan = Plan.of(train, keys.batching, keys.augment, progress.epochs, rounding, columns)
    if not test_only:
        pad_to_shapes(brain, plan, device, train, tokenizer)
    epochs = keys.epoch_counter.limit
    steps = progress.steps(len(plan), epochs)
    if logs:
        parameters = sum(parameter.numel() for parameter in brain.modules.parameters())
        logger.info("This run: a model of %.1f million parameters, %s, %d steps in all, on %s in %s; results in %s",
                    parameters / 1e6, counted(epochs, "epoch"), steps, device, brain.precision, keys.output_folder)
        _log_plan(plan, progress.epochs, steps, len(train), epochs)
    flops = utilisation(brain, device, train) if logs else None

    loaders = _Loaders.of(keys, config, {**manifests, "train": train}, tokenizer, columns, plan)
    if flops is not None and device.type == "cuda" and not train.has_urls:
        warn_of_slow_reading(brain, loaders.train, device)
    brain.open_run(train.texts, steps, epochs=progress.epochs, train_set=loaders.train, utilisation=flops,
                   results_folder=None if results_folder == keys.folder else results_folder)
    if test_only:
        ranks.run_on_main(restore.warn_unfinished, recipe)

    with _changes_named(guard, keys.folder):
        with loaders.train, loaders.valid:
            _fit(recipe, brain, loaders, guard)
        with loaders.test:
            brain.evaluate(loaders.test, **brain.metric.order)
    return brain


class _Loaders(NamedTuple):
    """What a run reads on this rank."""

    train: TrainLoader
    valid: EvalLoader
    test: EvalLoader

    @classmethod
    def of(cls, keys: TaskKeys, config: RunConfig, manifests: Mapping[str, Manifest], tokenizer: SupportsEncode | None,
           columns: BatchColumns, plan: Plan) -> _Loaders:
        """Make the loaders of the splits; ``plan`` is that of the train split."""
        shared: dict[str, Any] = {  # of the loaders' arguments
            "columns": columns, "sample_rate": keys.sample_rate, "rank": ranks.rank(), "world": ranks.world_size(),
            "workers": _workers(keys, config), "pin_memory": config.device.type == "cuda"}
        train = TrainLoader(
            manifests["train"], tokenizer, plan, augment=keys.augment, nonspeech=vars(keys).get("nonspeech"),
            epochs=keys.epoch_counter.limit, **shared)

        def evaluation(split: str, augment: Augment | None) -> EvalLoader:
            return EvalLoader(manifests[split], tokenizer, augment=augment,
                              max_batch_seconds=keys.batching.max_batch_seconds, **shared)

        return cls(train, evaluation("dev", keys.valid_augment), evaluation("test", keys.test_augment))


def _workers(keys: TaskKeys, config: RunConfig) -> int:
    """Return the number of data workers of this rank: ranks that the run itself started share them."""
    return keys.num_workers if config.cpu is None else math.ceil(keys.num_workers / config.cpu.ranks)


def _fit(recipe: Recipe, brain: Brain, loaders: _Loaders, guard: StartGuard) -> None:
    """Train the remaining epochs; a new run first takes its initial weights."""
    keys = recipe.keys
    resumed = not initial.fresh(keys)
    last_step = last_logged_step(keys.folder)
    if not resumed:
        warn_of_lost_steps(brain, last_step, len(loaders.train.plan))
        initial.load(brain)
        old_set.score_before(recipe, brain)
    brain.fit(_epochs(brain, guard, keys.epoch_counter, resumed, last_step), loaders.train, loaders.valid)


@contextlib.contextmanager
def _changes_named(guard: StartGuard, folder: Path) -> Iterator[None]:
    """Context in which checkpoints of another model are an error that says what has changed since they were saved."""
    try:
        yield
    except OtherModel as error:
        changes = guard.changes()
        if not changes:
            raise
        raise SbkitError("other-model",
                         f"the checkpoints in {folder} are of another model; what has changed: {'; '.join(changes)}",
                         hint=error.hint, file=folder) from error


def _log_plan(plan: Plan, began_with: int, steps: int, utterances: int, epochs: int) -> None:
    """Log what the plan leaves out, and how often an epoch goes through the corpus.

    began_with : the epochs that the run had at its first start
    steps : of the whole run
    """
    batching = plan.batching
    if plan.sampler.left_out:
        logger.warning("%d of %d utterances are in no step: fewer than %d have their label (clips_per)",
                       plan.sampler.left_out, utterances, batching.clips)
    if plan.passes > 1:
        note = "" if epochs == began_with else f", spread over the {began_with} epochs that it began with"
        logger.info("The corpus has %d steps: an epoch goes through it %d times, and the run has %d (min_steps: "
                    "%d%s)", len(plan) // plan.passes, plan.passes, steps, batching.min_steps, note)


def _epochs(brain: Brain, guard: StartGuard, epochs: EpochCounter, resumed: bool, last_step: int) -> Iterator[int]:
    """Yield the epochs. The first is requested once the newest checkpoint is loaded, and so the run begins.

    last_step : the last step that earlier starts logged; those after the checkpoint are trained again
    """
    changes = guard.changes()
    if resumed and changes:
        logger.warning("This run resumes with changed values: %s", "; ".join(changes))
    larger = keys_to_raise(epochs)
    if larger and ranks.is_main():
        logger.info("Epoch %d was the last, so only the test is left. Set a larger %s to train further",
                    epochs.current, larger)
    elif resumed and ranks.is_main():
        state = brain.train_state
        within = ""
        if state.steps_in_epoch:
            within = f", after {state.steps_in_epoch} of its {state.planned_steps_in_epoch} steps"
        repeated = ""
        if last_step > state.optimizer_step:
            repeated = f". What was trained since the last checkpoint, up to step {last_step} of the run, is repeated"
        logger.info("Continuing with epoch %d of %d%s%s", epochs.current + 1, epochs.limit, within, repeated)
    if brain.metrics_log is not None:
        goes_on = bool(changes) and resumed and not larger
        _log_start(brain, brain.metrics_log, changes if goes_on else [])
    guard.begins()
    yield from epochs


def _log_start(brain: Brain, log: MetricsLog, changes: Sequence[str]) -> None:
    """Write the line about a start of the run, with what has changed since the one that it continues."""
    recipe_keys = vars(brain.keys)
    parameters = sum(parameter.numel() for parameter in brain.modules.parameters())
    values: dict[str, Any] = {  # of a line of JSON
        "command": command(), "folder": os.getcwd(), "devices": ranks.world_size(), "device": str(brain.device),
        "precision": brain.precision, "threads": torch.get_num_threads(), "parameters": parameters,
        "environment": describe(), "max_batch_seconds": recipe_keys["batching"].max_batch_seconds,
        trained_on.MANIFESTS: trained_on.checksums(recipe_keys["corpus"])}
    if changes:
        values |= {"changed": changes, "after_step": brain.optimizer_step}
    log.write("run", **values)


def before_run(command_line: CommandLine, needed: Sequence[str] = SPLITS) -> Node | None:
    """Check the recipe of a run that is about to start: errors end the run, warnings are printed.

    needed : the splits that its corpus must have

    Returns its resolved tree, None if it has values that are only known once it is built.
    """
    from sbkit.recipe.check import check

    report = check(command_line.path, command_line.overrides, run_opts=command_line.run_opts, starting=True,
                   needed=needed)
    if report.errors:  # one message, so that torchrun's last lines have all of it
        problems = report.problems().replace(": error: ", ": ", 1)  # the command writes that in front
        refused_anyway = {"syntax", "missing-key", "setting", "bad-value", "wrong-value", "not-writable",
                          "no-such-path"}
        can_skip = refused_anyway.isdisjoint(finding.code for finding in report.errors)
        skip = "; --no-check skips this check" if can_skip else ""
        raise SbkitError("failed-check", f"{problems}\n{report.verdict()}{skip}", exit_code=1, file=command_line.path)
    if report.problems():
        print(report.problems(), file=sys.stderr, flush=True)
    print(report.verdict(), file=sys.stderr, flush=True)
    return report.tree


def before_training(recipe: Recipe, path: Path) -> None:
    """Check the labels of the prepared corpus against the model; ``path`` is the recipe's file."""
    findings = Findings()
    node = Node(None, Place(str(path)), "")
    recipe.task.check_labels(recipe.keys, recipe.keys.corpus.load(), findings, {"corpus": node})
    ignored = recipe.keys.ignore_findings or ()
    for finding in findings:
        if finding.severity == "error" or finding.code not in ignored:
            print(finding, file=sys.stderr, flush=True)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise SbkitError("failed-check",
                         "the labels don't fit the model",
                         hint="--no-check trains on them anyway", exit_code=1,
                         file=path)
