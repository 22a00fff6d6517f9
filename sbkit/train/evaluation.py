"""Passes over validation and test sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from speechbrain.core import Stage
from torch import nn

from sbkit.nn import guard
from sbkit.train import loaders
from sbkit.train.between import Between
from sbkit.train.distributed import ranks
from sbkit.train.given import DataSource
from sbkit.train.hooks import Evaluates
from sbkit.train.memory import host
from sbkit.train.memory.oom import OomRetry
from sbkit.train.monitor.display import StageDisplay
from sbkit.train.monitor.tally import DeviceMean, one_number
from sbkit.train.stepper import Stepper


class EvaluationLoop:
    """Evaluates sets without changing the model, with averaged weights if the run keeps them.

    Arguments
    ---------
    hooks : the Brain's methods around a pass and for a batch
    stepper : holds the modules
    retry : computes a batch in parts if it does not fit into memory
    between : knows whether the run should stop
    """

    def __init__(self, hooks: Evaluates, stepper: Stepper, retry: OomRetry, between: Between):
        self.hooks, self.stepper, self.retry, self.between = hooks, stepper, retry, between
        self.state = stepper.state

    def run(self, loader: DataSource, stage: Stage, name: str, show: bool) -> float:
        """Return the average loss over a set. Call it without gradients.

        If the set yields this rank's share, the average is exact over all ranks. The loop never waits for another
        rank, so shares may differ in size. A stop signal ends it early.
        """
        hooks, state, own_average = self.hooks, self.state, self.stepper.overrides.update_average
        if self.stepper.device.type == "cpu":
            host.trim()  # before the loader forks
        state.step, average = 0, 0.0
        mean, share = DeviceMean(hooks.device), loaders.is_share(loader)
        colour = hooks.tqdm_barcolor[stage.name.lower()] or None
        display = StageDisplay(name, loaders.length(loader), show=show, colour=colour)
        with self._at_rest(), self.stepper.wrap.gathered(), self._averaged_weights(), display:
            for batch in loaders.on_device(loader, loader, hooks.device) if share else loader:
                if self.between.asked_to_stop:
                    break
                state.step += 1
                self.stepper.graphs.next_batch()
                loss = self.retry.evaluate(batch, stage)
                hooks.close_batch(batch, stage)
                if own_average:
                    average = hooks.update_average(one_number(loss), average)
                else:
                    mean.add(loss)
                guard.poll()
                display.update(seconds=getattr(batch, "seconds", 0.0))
                if hooks.debug and state.step == hooks.debug_batches:
                    break
            guard.poll(wait=True)  # raises now if a label was invalid
        over_ranks = share or hooks.shares_validation
        if over_ranks:
            ranks.meet(name)
        return average if own_average else mean.value(over_ranks)

    @torch.no_grad()
    def validate(self, loader: DataSource, epoch: int, show: bool) -> None:
        """Validate and call the hooks around it; a run that should stop saves the end of the training instead."""
        hooks, state = self.hooks, self.state
        try:
            hooks.open_stage(Stage.VALID, epoch)
            loss = self.run(loader, Stage.VALID, f"valid {epoch}", show)
            state.step = 0
            ranks.meet("validated")
            if ranks.any_of(self.between.flags())["stop"]:
                state.back_to_training()
                self.between.leave()
        finally:
            if hooks.checkpointer is not None:
                hooks.checkpointer.drop()
        hooks.close_stage(Stage.VALID, loss, epoch)

    def _averaged_weights(self) -> contextlib.AbstractContextManager[Any]:
        ema = self.stepper.ema
        return contextlib.nullcontext() if ema is None else ema.swapped()

    @contextlib.contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Put all layers into evaluation mode inside this context, including those that only ``hparams`` holds.

        Many recipes leave ``normalize`` out of ``modules``. Its statistics would include dev data, and ranks with
        shares of different sizes would wait for each other in it.
        """
        self.hooks.modules.eval()
        held = [value for value in vars(self.hooks.hparams).values() if isinstance(value, nn.Module)]
        beside = [layer for value in held for layer in value.modules() if layer.training]
        for layer in beside:
            layer.training = False
        try:
            yield
        finally:
            for layer in beside:
                layer.training = True
