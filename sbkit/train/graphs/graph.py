"""What is captured: a micro-step or an update, with the tensors that go in and come out at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from sbkit.data.batch import Batch
from sbkit.nn import guard
from sbkit.train.batches import MicroBatch, tensors_in, utterance_ids
from sbkit.train.runner import MicroStep, Rates


@dataclass
class MicroStepGraph:
    """Forward and backward of a micro-batch: a replay adds its gradients to where the capture did."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    """The tensors of a batch, see ``tensors_of``, which the kernels read."""
    result: MicroStep
    """What the last replay has computed; the next one overwrites its tensors."""
    checks: Tensor | None
    """The results of indices that ``guard`` checks, None if there are none ..."""
    tables: Sequence[guard.Checked]
    """... and what they are checked against."""
    held: object
    """What kernels read, and perhaps nobody else holds."""

    def replay(self, batch: MicroBatch) -> None:
        """Compute another batch of the same shapes."""
        for static, new in zip(self.inputs, tensors_of(batch), strict=True):
            static.copy_(new, non_blocking=True)
        self.graph.replay()
        if self.checks is not None:
            guard.check_later(self.checks, self.tables, utterance_ids(batch) or None)

    def copied_result(self) -> MicroStep:
        """Return what the last replay has computed, with sums that outlast the next one."""
        return self.result._replace(sums=self.result.sums.clone())


@dataclass
class UpdateGraph:
    """An update: a replay changes the weights by the gradients in their places, and leaves zeros there."""

    graph: torch.cuda.CUDAGraph
    sums: Tensor
    """The sums of a step, which the kernels read."""
    values: Tensor
    """What ``Runner.update`` returns."""
    rates: Rates
    """The tensors of learning rates that the kernels read, held so that they stay."""

    def replay(self, sums: Tensor, optimizers: Sequence[Optimizer]) -> Tensor:
        """Update by other sums, and count the step where the host counts."""
        self.sums.copy_(sums)
        self.graph.replay()
        for optimizer in optimizers:
            if hasattr(optimizer, "count_step"):
                optimizer.count_step()
        return self.values


def tensors_of(batch: MicroBatch) -> list[Tensor]:
    """Return the tensors of a batch, in a fixed order."""
    return batch.tensors() if isinstance(batch, Batch) else [tensor for _, tensor in tensors_in(batch)]
