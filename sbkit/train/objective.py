"""The forward and the loss of a training batch as one function, for DDP, FSDP and repeated backwards."""

from __future__ import annotations

from typing import NamedTuple

import torch
from speechbrain.core import Stage

from sbkit.train.given import MicroBatch, Objectives, Outputs
from sbkit.train.hooks import Computes
from sbkit.train.monitor.timing import StepBudget
from sbkit.train.precision import losses_in_fp32
from sbkit.train.step import Loss, as_loss


class Found(NamedTuple):
    """The outputs and objectives of a recipe for a batch, and the loss as sums."""

    outputs: Outputs = None
    objectives: Objectives = None
    loss: Loss | None = None


class Objective:
    """Calls a recipe's ``compute_forward`` and ``compute_objectives``, and keeps their results in ``found``.

    >>> total = objective(batch)  # doctest: +SKIP
    >>> total.backward(), objective.found.outputs  # doctest: +SKIP
    """

    def __init__(self, hooks: Computes, budget: StepBudget):
        self.hooks, self.budget, self.found = hooks, budget, Found()

    def __call__(self, batch: MicroBatch) -> torch.Tensor:
        """Return the summed loss, to call ``backward`` on."""
        context = self.hooks.training_ctx
        with context:
            with self.budget("forward"):
                outputs = self.hooks.compute_forward(batch, Stage.TRAIN)
            with self.budget("loss"):
                outputs = losses_in_fp32(outputs, context)
                objectives = self.hooks.compute_objectives(outputs, batch, Stage.TRAIN)
        loss = as_loss(objectives, getattr(batch, "weight", 1.0))
        self.found = Found(outputs, objectives, loss)
        return loss.total

    @property
    def loss(self) -> Loss:
        """The loss of the last batch."""
        if self.found.loss is None:
            raise RuntimeError("no batch was computed")
        return self.found.loss

    def forget(self) -> None:
        """Release the results of the last batch."""
        self.found = Found()
