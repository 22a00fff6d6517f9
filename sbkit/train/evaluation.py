"""One pass over a validation or test set, and what an epoch's validation is besides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from speechbrain.core import Stage
from torch import nn

from sbkit.nn import guard
from sbkit.train import loaders
from sbkit.train.distributed import ranks
from sbkit.train.memory import host
from sbkit.train.monitor.display import StageDisplay
from sbkit.train.monitor.tally import DeviceMean, one_number


@contextlib.contextmanager
def _at_rest(brain: Any) -> Iterator[None]:
    """Within it no layer learns from what it sees, one that only ``hparams`` holds as little as the others.

    Many a recipe leaves its ``normalize`` out of ``modules``: dev data would enter its statistics, and with shares
    that differ in size ranks would wait in it for each other.
    """
    brain.modules.eval()
    held = [value for value in vars(brain.hparams).values() if isinstance(value, nn.Module)]
    beside = [layer for value in held for layer in value.modules() if layer.training]
    for layer in beside:
        layer.training = False
    try:
        yield
    finally:
        for layer in beside:
            layer.training = True


def evaluate(brain: Any, loader: Any, stage: Stage, name: str, show: bool) -> float:
    """Average loss over a set, to be called without gradients.

    A set that yields this rank's share is averaged over all ranks, exactly. Nothing inside the loop waits
    for another rank, so shares may differ in size. A stop signal ends it early.
    """
    if brain.device_type == "cpu":
        host.trim()  # the loader may fork now
    brain.step, average = 0, 0.0
    mean, share = DeviceMean(brain.device), loaders.is_share(loader)
    weights = contextlib.nullcontext() if brain._ema is None else brain._ema.swapped()
    colour = brain.tqdm_barcolor[stage.name.lower()] or None
    gathered = contextlib.nullcontext() if brain._parallel is None else brain._parallel.gathered()
    display = StageDisplay(name, loaders.length(loader), show=show, colour=colour)
    with _at_rest(brain), gathered, weights, display:
        for batch in loaders.on_device(loader, loader, brain.device) if share else loader:
            if brain._between.asked_to_stop:
                break
            brain.step += 1
            brain._graphs.next_batch()
            loss = brain._parts.evaluate(batch, stage)
            if brain._averages_itself:
                average = brain.update_average(one_number(loss), average)
            else:
                mean.add(loss)
            guard.poll()
            display.update(seconds=getattr(batch, "seconds", 0.0))
            if brain.debug and brain.step == brain.debug_batches:
                break
        guard.poll(wait=True)  # no score is made of labels outside their table
    over_ranks = share or brain._shares_validation
    if over_ranks:
        ranks.meet(name)
    return average if brain._averages_itself else mean.value(over_ranks)


@torch.no_grad()
def validate(brain: Any, loader: Any, epoch: Any, show: bool) -> None:
    """An epoch's validation between its hooks; a run that is told to stop leaves as it was at the end of training."""
    try:
        brain.on_stage_start(Stage.VALID, epoch)
        loss = evaluate(brain, loader, Stage.VALID, f"valid {epoch}", show)
        brain.step = 0
        ranks.meet("validated")
        if ranks.any_of(brain._between.flags())["stop"]:
            brain.step, brain._epoch_step, brain._average, brain.nonfinite_count = brain._trained
            brain._between.leave()
    finally:
        if brain.checkpointer is not None:
            brain.checkpointer.drop()
    brain.on_stage_end(Stage.VALID, loss, epoch)
