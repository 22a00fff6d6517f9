"""A pass over a dataset without gradients: a validation or a test of a Brain."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from speechbrain.core import Stage
from torch import nn

from sbkit.compat import loaders, workers
from sbkit.nn import guard
from sbkit.system import memory
from sbkit.system.cores import all_cores
from sbkit.train.batches import DataSource
from sbkit.train.distributed import ranks
from sbkit.train.loss import Loss, one_number
from sbkit.train.monitor.display import StageDisplay


class MeanLoss:
    """The mean of the losses of a pass, summed on the device so that nothing waits for it; not finite ones don't count.
    """

    def __init__(self, device: str):
        self.total_and_count = torch.zeros(2, device=device)

    def add(self, loss: Loss) -> None:
        total = loss.total.detach().to(self.total_and_count).reshape(())
        if isinstance(loss.count, torch.Tensor):
            count = loss.count.to(total).reshape(())
        else:
            count = torch.full_like(total, loss.count)
        self.total_and_count += torch.where(torch.isfinite(total), torch.stack([total, count]), 0.0)

    def value(self, over_ranks: bool) -> float:
        """Return the mean, which waits for the device; NaN if nothing counts, such as clips too short for a loss.

        over_ranks : whether each rank has added its own share
        """
        summed = ranks.sum_across(self.total_and_count) if over_ranks else self.total_and_count
        total, count = summed.tolist()
        return total / count if count else math.nan


def evaluation_pass(brain: Any, loader: DataSource, stage: Stage, name: str,  # brain: an sbkit.Brain
                    show: bool) -> float:
    """Evaluate each batch of a loader, with averaged weights if the run keeps them, and return the average loss.

    Call it without gradients. If the loader yields this rank's share, the average is exact over all ranks. No rank
    waits for another before the end, so shares may differ in size. A stop signal ends the pass early.

    name, show : what to call the progress bar, and whether to show it
    """
    trainer = brain.trainer
    if brain.device_type == "cpu":
        memory.trim()  # before the loader forks
    yields_share = loaders.is_share(loader)
    batches = loaders.on_device(loader, loader, brain.device) if yields_share else loader
    averages_itself = "update_average" in brain.overridden_methods
    average = 0.0
    mean_loss = MeanLoss(brain.device)
    display = StageDisplay(name, loaders.length(loader), show=show,
                           colour=brain.tqdm_barcolor[stage.name.lower()] or None)
    averaged_weights = contextlib.nullcontext() if trainer.moving_average is None else trainer.moving_average.swapped()
    threads = all_cores() if brain.device_type == "cpu" else contextlib.nullcontext()

    brain.step = 0
    with threads, evaluation_mode(brain.layer_roots), trainer.parallel.gathered(), averaged_weights, display:
        for batch in workers.iterator_of(batches):
            if trainer.asked_to_stop:
                break
            brain.step += 1
            loss = brain.evaluate_batch(batch, stage=stage)
            brain.close_batch(batch, stage)
            if averages_itself:
                average = brain.update_average(one_number(loss, "evaluate_batch"), average)
            elif isinstance(loss, Loss):
                mean_loss.add(loss)
            else:
                mean_loss.add(Loss(one_number(loss, "evaluate_batch"), 1.0))

            guard.poll()
            display.count(batch)
            if time.monotonic() >= display.draw_at:
                display.draw()
            if brain.debug and brain.step == brain.debug_batches:
                break
        guard.poll(wait=True)  # raises now if a label was invalid

    over_ranks = yields_share or brain.shares_validation
    if over_ranks:
        ranks.barrier(name)
    return average if averages_itself else mean_loss.value(over_ranks)


@contextlib.contextmanager
def evaluation_mode(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Switch layers to evaluation; what isn't among the Brain's modules, the first root, is switched back on exit.

    Many recipes leave ``normalize`` out of ``modules``. Left in training, its statistics would include dev data, and
    ranks with shares of different sizes would wait for each other in it.
    """
    modules, *beside = roots
    modules.eval()
    training = [layer for root in beside for layer in root.modules() if layer.training]
    for layer in training:
        layer.training = False
    try:
        yield
    finally:
        for layer in training:
            layer.training = True
