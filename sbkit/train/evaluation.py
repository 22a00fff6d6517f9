"""Passes over validation and test sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import speechbrain as sb
import torch
from speechbrain.core import Stage
from torch import nn

from sbkit.nn import guard
from sbkit.train import loaders
from sbkit.train.batches import DataSource, Objectives, length
from sbkit.train.distributed import ranks
from sbkit.train.memory import host
from sbkit.train.memory.oom import joined, parts_of, too_long
from sbkit.train.monitor.display import StageDisplay
from sbkit.train.monitor.tally import DeviceMean, one_number
from sbkit.train.step import Loss
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
            host.trim()  # before the loader forks
        state.step, average = 0, 0.0
        mean, share = DeviceMean(brain.device), loaders.is_share(loader)
        colour = brain.tqdm_barcolor[stage.name.lower()] or None
        display = StageDisplay(name, loaders.length(loader), show=show, colour=colour)
        averaged = contextlib.nullcontext() if trainer.ema is None else trainer.ema.swapped()
        with self._eval_mode(), trainer.wrap.gathered(), averaged, display:
            for batch in loaders.iterator_of(loaders.on_device(loader, loader, brain.device) if share else loader):
                if trainer.asked_to_stop:
                    break
                state.step += 1
                trainer.graphs.next_batch()
                loss = self._evaluate(batch, stage)
                brain.close_batch(batch, stage)
                if self.own_average:
                    average = brain.update_average(one_number(loss), average)
                else:
                    mean.add(loss)
                guard.poll()
                display.update(seconds=getattr(batch, "seconds", 0.0))
                if brain.debug and state.step == brain.debug_batches:
                    break
            guard.poll(wait=True)  # raises now if a label was invalid
        over_ranks = share or brain.shares_validation
        if over_ranks:
            ranks.barrier(name)
        return average if self.own_average else mean.value(over_ranks)

    def _evaluate(self, batch: object, stage: Stage) -> Objectives:
        """Call ``evaluate_batch`` for a batch, in halves if it does not fit into memory.

        Only what failed is split, so that no utterance is transcribed twice.
        """
        memory = self.trainer.memory
        if memory.may_fit(batch):
            try:
                return memory.threads.call(self.brain.evaluate_batch, batch, stage=stage)
            except Exception as error:
                if not memory.ran_out(error):
                    raise
                if length(batch) == 1:
                    raise too_long(memory.device, batch) from error
            memory.halve_from_now_on(batch)
        losses, shares = [], []
        for half, of_whole, _ in parts_of(batch, 2):
            losses.append(self._evaluate(half, stage))
            shares.append(of_whole)
        if all(isinstance(loss, Loss) for loss in losses):
            return joined(losses)
        return sum(loss * of_whole for loss, of_whole in zip(losses, shares, strict=True))

    @torch.no_grad()
    def validate(self, loader: DataSource, epoch: int, show: bool) -> None:
        """Validate and call the hooks around it; a run that should stop saves the end of the training instead."""
        brain, trainer = self.brain, self.trainer
        try:
            brain.open_stage(Stage.VALID, epoch)
            loss = self.run(loader, Stage.VALID, f"valid {epoch}", show)
            trainer.state.step = 0
            ranks.barrier("validated")
            if ranks.any_of(trainer.flags())["stop"]:
                trainer.state.back_to_training()
                trainer.save_and_stop()
        finally:
            if brain.checkpointer is not None:
                brain.checkpointer.drop()
        brain.close_stage(Stage.VALID, loss, epoch)

    @contextlib.contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Put all layers into evaluation mode inside this context, including those that only ``hparams`` holds.

        Many recipes leave ``normalize`` out of ``modules``. Its statistics would include dev data, and ranks with
        shares of different sizes would wait for each other in it.
        """
        self.brain.modules.eval()
        held = [value for value in vars(self.brain.hparams).values() if isinstance(value, nn.Module)]
        beside = [layer for value in held for layer in value.modules() if layer.training]
        for layer in beside:
            layer.training = False
        try:
            yield
        finally:
            for layer in beside:
                layer.training = True
