"""What the host learns of a step: one row of numbers, which is copied in the background and read one step later.

    gradient norm, skipped, loss scale, scale of sums | loss, count, sum and count of each extra | flags
    by the update, alike on all ranks                 | summed over micro-batches and ranks      | summed over ranks

``step_values`` puts the row together on the device, and ``ArrivingSteps`` takes it apart on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sbkit.nn.peek import Peek
from sbkit.train.step import COUNT, TOTAL, StepResult

#: What any rank may ask for with a step, so that all ranks do it at the same step: to stop, to save, and to agree anew
#: on the parameters whose gradients are exchanged.
FLAGS = ("stop", "save", "parameters")
_BY_UPDATE = 4
"""The numbers of a row before its sums."""


def step_values(norm: torch.Tensor, skipped: torch.Tensor, scales: Sequence[torch.Tensor], sums: torch.Tensor
                ) -> torch.Tensor:
    """Return the row of a step.

    norm, skipped : what ``update`` returned
    scales : see ``precision.Unscaled.scales``
    sums : of the step over all ranks, see ``step.row_of``, and behind them the flags
    """
    return torch.cat([torch.stack([norm, skipped, *scales]), sums])


@dataclass
class _Arriving:
    """A step whose row is being copied to the host."""

    values: Peek
    names: list[str]
    """Of extras."""
    batches: list[Any]
    """This rank's micro-batches."""
    number: int
    """Of the step, from 1."""

    def total_and_count(self) -> tuple[float, float]:
        """Return the loss, summed, and its count; waits for the copy."""
        sums = self.values.numpy().tolist()[_BY_UPDATE:]
        return sums[TOTAL], sums[COUNT]


@dataclass
class ArrivingSteps:
    """The steps whose rows are being copied, the oldest first.

    lag : how many steps may be computed behind the host's back before it reads the oldest one
    """

    lag: int
    _steps: list[_Arriving] = field(default_factory=list)

    def add(self, values: torch.Tensor, names: list[str], batches: list[Any], number: int) -> None:
        """Begin to copy the row of a step; see ``_Arriving``."""
        self._steps.append(_Arriving(Peek(values), names, batches, number))

    def take(self, wait: bool) -> Iterator[tuple[StepResult, set[str]]]:
        """Yield the steps that have arrived, each with what any rank asked for: all but the newest, or all to wait for.

        This depends only on the number of steps, so all ranks get the same steps at the same point.
        """
        while len(self._steps) > (0 if wait else self.lag):
            late = len(self._steps) - 1
            step = self._steps.pop(0)
            norm, skipped, scale, sum_scale, *sums = step.values.numpy().tolist()
            total, count, *more = sums
            ends = 2 * len(step.names)
            extras = dict(zip(step.names, zip(more[:ends:2], more[1:ends:2], strict=True), strict=True))
            flags = {name for name, raised in zip(FLAGS, more[ends:], strict=True) if raised}
            yield StepResult(total, count, norm, skipped > 0, scale, sum_scale, extras, step.batches,
                             number=step.number, late=late), flags

    def losses(self) -> Iterator[tuple[float, float]]:
        """Yield loss and count of the steps that nobody has taken yet; waits for them."""
        return (step.total_and_count() for step in self._steps)
