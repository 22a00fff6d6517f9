"""Means of losses: on the host for training epochs, on the device for evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from sbkit.train.distributed import ranks
from sbkit.train.step import Loss


class Mean:
    """A mean as sum and count, or a value set by a recipe."""

    def __init__(self) -> None:
        self.total = self.count = self._set = 0.0

    def add(self, total: float, count: float) -> None:
        """Add a sum and its count, unless the sum is not finite."""
        if math.isfinite(total):
            self.total += total
            self.count += count

    def set(self, value: float) -> None:
        """Discard sums and set a value, which sums added later replace."""
        self.total = self.count = 0.0
        self._set = value

    def known(self) -> float | None:
        """Return the mean; None before there is one."""
        return self.value() if self.count or self._set else None

    def value(self, more: Iterable[tuple[float, float]] = ()) -> float:
        """Return the mean, including further sums that are not added permanently."""
        whole = Mean()
        for total, count in [(self.total, self.count), *more]:
            whole.add(total, count)
        return whole.total / whole.count if whole.count else self._set


class DeviceMean:
    """A mean of losses that stays on the device until ``value`` is called."""

    def __init__(self, device: torch.device | str):
        self._sums = torch.zeros(2, device=device)  # sum and count

    def add(self, loss: Loss | torch.Tensor | float) -> None:
        """Add a ``Loss`` or one number, unless it is not finite."""
        loss = loss if isinstance(loss, Loss) else Loss(one_number(loss), 1.0)
        total = loss.total.detach().to(self._sums).reshape(())
        count = loss.count if isinstance(loss.count, torch.Tensor) else torch.full_like(total, loss.count)
        self._sums += torch.where(torch.isfinite(total), torch.stack([total, count.to(total).reshape(())]), 0.0)

    def value(self, over_ranks: bool = False) -> float:
        """Return the mean of this rank, or of all; nan if nothing was counted, such as clips too short for a loss."""
        total, count = (ranks.sum_across(self._sums) if over_ranks else self._sums).tolist()
        return total / count if count else math.nan


def one_number(loss: Loss | torch.Tensor | float) -> torch.Tensor:
    """Convert a loss of any kind to a tensor with one element."""
    if isinstance(loss, Loss):
        loss = loss.mean
    return loss if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
