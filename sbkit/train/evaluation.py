"""Passes over validation and test sets."""

from __future__ import annotations

import contextlib
import math
import time

import speechbrain as sb
import torch
from speechbrain.core import Stage
from torch import nn

from sbkit.nn import guard
from sbkit.system import memory
from sbkit.train import loaders
from sbkit.train.batches import DataSource
from sbkit.train.distributed import ranks
from sbkit.train.monitor.display import StageDisplay
from sbkit.train.step import Loss, one_number
from sbkit.train.trainer import Trainer


class EvaluationLoop:
    """Evaluates sets without changing the model, with averaged weights if the run keeps them.

    own_average : whether the recipe averages the losses of batches itself (``update_average``)
    """

    def __init__(self, brain: sb.Brain, trainer: Trainer, own_average: bool):
        self.brain, self.trainer, self.own_average = brain, trainer, own_average

    def run(self, loader: DataSource, stage: Stage, name: str, show: bool) -> float:
        """Return the average loss over a set. Call it without gradients.

        If the set yields this rank's share, the average is exact over all ranks. The loop never waits for another
        rank, so shares may differ in size. A stop signal ends it early.
        """
        brain, trainer, state = self.brain, self.trainer, self.trainer.state
        if trainer.device.type == "cpu":
            memory.trim()  # before the loader forks
        state.step, average = 0, 0.0
        share = loaders.is_share(loader)
        sums = torch.zeros(2, device=brain.device)  # of losses, and their count: nothing waits for the device
        colour = brain.tqdm_barcolor[stage.name.lower()] or None
        display = StageDisplay(name, loaders.length(loader), show=show, colour=colour)
        sharded = contextlib.nullcontext() if trainer.sharded is None else trainer.sharded.gathered()
        averaged = contextlib.nullcontext() if trainer.ema is None else trainer.ema.swapped()
        brain.modules.eval()
        # Also layers that only ``hparams`` holds: many recipes leave ``normalize`` out of ``modules``. Its statistics
        # would include dev data, and ranks with shares of different sizes would wait for each other in it.
        held = [value for value in vars(brain.hparams).values() if isinstance(value, nn.Module)]
        with contextlib.ExitStack() as after, sharded, averaged, display:
            for layer in [layer for value in held for layer in value.modules() if layer.training]:
                layer.training = False
                after.callback(setattr, layer, "training", True)
            for batch in loaders.iterator_of(loaders.on_device(loader, loader, brain.device) if share else loader):
                if trainer.asked_to_stop:
                    break
                state.step += 1
                loss = brain.evaluate_batch(batch, stage=stage)
                brain.close_batch(batch, stage)
                if self.own_average:
                    average = brain.update_average(one_number(loss), average)
                else:
                    loss = loss if isinstance(loss, Loss) else Loss(one_number(loss), 1.0)
                    total = loss.total.detach().to(sums).reshape(())
                    count = loss.count if isinstance(loss.count, torch.Tensor) else torch.full_like(total, loss.count)
                    sums += torch.where(torch.isfinite(total), torch.stack([total, count.to(total).reshape(())]), 0.0)
                guard.poll()
                display.count(batch)
                if time.monotonic() >= display.draw_at:
                    display.draw()
                if brain.debug and state.step == brain.debug_batches:
                    break
            guard.poll(wait=True)  # raises now if a label was invalid
        over_ranks = share or brain.shares_validation
        if over_ranks:
            ranks.barrier(name)
        if self.own_average:
            return average
        summed, counted = (ranks.sum_across(sums) if over_ranks else sums).tolist()
        return summed / counted if counted else math.nan  # nothing was counted, such as clips too short for a loss

    @torch.no_grad()
    def validate(self, loader: DataSource, epoch: int, show: bool) -> None:
        """Validate and call the hooks around it; a run that should stop saves the end of the training instead."""
        brain, trainer = self.brain, self.trainer
        try:
            brain.open_stage(Stage.VALID, epoch)
            loss = self.run(loader, Stage.VALID, f"valid {epoch}", show)
            trainer.state.step = 0
            ranks.barrier("validated")
            if ranks.any_of({"stop": trainer.asked_to_stop})["stop"]:
                trainer.state.back_to_training()
                trainer.save_and_stop()
        finally:
            if brain.checkpointer is not None:
                brain.checkpointer.drop()
        brain.close_stage(Stage.VALID, loss, epoch)
