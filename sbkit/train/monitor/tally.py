"""Means of losses: of a training epoch on the host, of an evaluation on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from sbkit.train.distributed import ranks
from sbkit.train.step import Loss


class Mean:
    """Sum over count; a recipe may also set the value."""

    def __init__(self) -> None:
        self.total = self.count = self._set = 0.0

    def add(self, total: float, count: float) -> None:
        """What is not finite is left out."""
        if math.isfinite(total):
            self.total += total
            self.count += count

    def set(self, value: float) -> None:
        """Start anew from a value; sums added later replace it."""
        self.total = self.count = 0.0
        self._set = value

    def value(self, more: Iterable[tuple[float, float]] = ()) -> float:
        """The mean, with further sums counted in for this once."""
        whole = Mean()
        for total, count in [(self.total, self.count), *more]:
            whole.add(total, count)
        return whole.total / whole.count if whole.count else self._set


class DeviceMean:
    """Sum over count of losses that stay on the device until ``value`` is asked for."""

    def __init__(self, device: torch.device | str):
        self._sums = torch.zeros(3, device=device)  # of losses, of what they count for, and losses left out

    def add(self, loss: Any) -> None:
        """A ``Loss`` or one number; what is not finite is left out."""
        loss = loss if isinstance(loss, Loss) else Loss(one_number(loss), 1.0)
        total = loss.total.detach().to(self._sums).reshape(())
        count = loss.count if isinstance(loss.count, torch.Tensor) else torch.full_like(total, loss.count)
        zero, one = torch.zeros_like(total), torch.ones_like(total)
        self._sums += torch.where(torch.isfinite(total), torch.stack([total, count.to(total).reshape(()), zero]),
                                  torch.stack([zero, zero, one]))

    def value(self, over_ranks: bool = False) -> float:
        """The mean of this rank, or of all; nan where nothing but losses that were left out came."""
        total, count, left_out = (ranks.sum_across(self._sums) if over_ranks else self._sums).tolist()
        return total / count if count else math.nan if left_out else 0.0


def one_number(loss: Any) -> torch.Tensor:
    """A loss of any kind as a tensor of one element."""
    if isinstance(loss, Loss):
        loss = loss.mean
    return loss if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
