"""What the host learns of a step: numbers that are summed on the device, copied behind its back, and read a step later.

A micro-batch has sums (``sums_of``), which ``StepSums`` adds up. All ranks then sum theirs, together with a flag for
each thing that a rank may ask of all. The update puts four numbers before them (``step_values``):

    gradient norm, skipped, loss scale, scale of sums | loss, count, sum and count of each extra | flags
    by the update, alike on all ranks                 | summed over micro-batches and ranks      | summed over ranks

``ArrivingSteps`` copies these values to the host, and makes a ``StepResult`` of them. Only this file knows their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sbkit.errors import SbkitError
from sbkit.nn.peek import Peek
from sbkit.train.batches import KeptBatch
from sbkit.train.loss import Loss

#: What any rank may ask for with a step, so that all ranks do it at the same step: to stop, to save, and to agree anew
#: on the parameters whose gradients are exchanged.
FLAGS = ("stop", "save", "agree")
#: Where sums have the loss and its count.
TOTAL, COUNT = 0, 1
_BY_UPDATE = 4
"""How many of a step's values are before its sums."""


# ------------------------------------------------------------ on the device


def sums_of(loss: Loss, device: torch.device) -> tuple[torch.Tensor, list[str]]:
    """Return a loss, its count, then sum and count of each extra, as one tensor on the device, and the extras' names.

    Sums are added over micro-batches and ranks without leaving the device.
    """
    extras = loss.extras or {}
    names = sorted(extras)
    pairs = [(loss.total, loss.count), *(extras[name] for name in names)]
    return torch.stack([_on(device, number) for pair in pairs for number in pair]), names


def _on(device: torch.device, number: torch.Tensor | float) -> torch.Tensor:
    if isinstance(number, torch.Tensor):
        return number.detach().reshape(()).to(device=device, dtype=torch.float32)
    return torch.full((), float(number), dtype=torch.float32, device=device)  # torch.tensor would copy from the host


class StepSums:
    """The sums of a step's micro-batches on this rank, added up on the device."""

    def __init__(self) -> None:
        self.extra_names: list[str] = []
        self._sums: torch.Tensor | None = None

    def add(self, sums: torch.Tensor, extra_names: list[str]) -> None:
        """Add those of a micro-batch; all of a step must have the same extras."""
        if self._sums is None:
            self._sums = sums
            self.extra_names = extra_names
            return
        if extra_names != self.extra_names:
            raise SbkitError("bad-loss", "the micro-batches of one step return different extras: "
                             f"{self.extra_names} and {extra_names}", hint="return the same names each time")
        self._sums = self._sums + sums

    def with_flags(self, flags: torch.Tensor) -> torch.Tensor:
        """Return what this rank sends with the step: its sums, and behind them a number for each of ``FLAGS``."""
        assert self._sums is not None, "a step has a micro-batch"
        return torch.cat([self._sums, flags])


def step_values(norm: torch.Tensor, skipped: torch.Tensor, scales: Sequence[torch.Tensor], sums: torch.Tensor
                ) -> torch.Tensor:
    """Return the values of a step.

    norm, skipped : what ``update`` returned
    scales : see ``Precision.scales``
    sums : of the step over all ranks, with flags
    """
    return torch.cat([torch.stack([norm, skipped, *scales]), sums])


# ------------------------------------------------------------ on the host


class StepResult(NamedTuple):
    """The values of one optimizer step, after their copy from the device."""

    total: float  # loss, summed over ranks and micro-batches
    count: float  # type: ignore[assignment]  # of the loss' units; it hides a method of tuples that is not used here
    norm: float  # gradient norm of the mean loss, before clipping
    skipped: bool  # not updated, because something was not finite
    scale: float  # loss scale of a mean (1 unless fp16)
    sum_scale: float  # additional factor of sums (1 unless fp16)
    extras: dict[str, tuple[float, float]]  # sum and count, by name
    batches: list[KeptBatch]  # this rank's micro-batches
    number: int  # of the optimizer step, from 1
    late: int = 0  # number of steps taken before its values arrived
    asked: frozenset[str] = frozenset()  # which of ``FLAGS`` any rank raised

    @property
    def loss(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def failed(self) -> bool:
        """Whether the step was not finite for another reason than a loss scale that was tried too high."""
        return not math.isfinite(self.total) or (self.skipped and self.scale <= 1.0)

    @property
    def failed_part(self) -> str:
        """What was not finite: the loss, or else a gradient."""
        return "gradient" if math.isfinite(self.total) else "loss"


@dataclass
class _ArrivingStep:
    """A step whose values are being copied to the host."""

    values: Peek
    extra_names: list[str]
    batches: list[KeptBatch]
    number: int

    def total_and_count(self) -> tuple[float, float]:
        """Return the loss, summed, and its count; waits for the copy."""
        sums = self.values.numpy().tolist()[_BY_UPDATE:]
        return sums[TOTAL], sums[COUNT]

    def result(self, late: int) -> StepResult:
        """Take the values apart; waits for the copy."""
        values = self.values.numpy().tolist()
        norm, skipped, scale, sum_scale = values[:_BY_UPDATE]
        total, count, *more = values[_BY_UPDATE:]
        extras: dict[str, tuple[float, float]] = {}
        for place, name in enumerate(self.extra_names):
            extras[name] = (more[2 * place], more[2 * place + 1])
        flags = more[2 * len(self.extra_names):]
        asked = frozenset(name for name, ranks_asking in zip(FLAGS, flags, strict=True) if ranks_asking)
        return StepResult(total, count, norm, skipped > 0, scale, sum_scale, extras, self.batches, self.number, late,
                          asked)


@dataclass
class ArrivingSteps:
    """The steps whose values are being copied, the oldest first.

    lag : how many steps may be computed behind the host's back before it reads the oldest one
    """

    lag: int
    _steps: list[_ArrivingStep] = field(default_factory=list)

    def add(self, values: torch.Tensor, extra_names: list[str], batches: list[KeptBatch], number: int) -> None:
        """Begin to copy the values of a step.

        batches : this rank's micro-batches
        number : of the step, from 1
        """
        self._steps.append(_ArrivingStep(Peek(values), extra_names, batches, number))

    def take(self, wait: bool) -> Iterator[StepResult]:
        """Yield the results of steps and forget them: of all steps but the newest, or of all with ``wait``.

        This depends only on the number of steps, so all ranks get the same steps at the same point.
        """
        while len(self._steps) > (0 if wait else self.lag):
            late = len(self._steps) - 1
            yield self._steps.pop(0).result(late)

    def losses(self) -> Iterator[tuple[float, float]]:
        """Yield loss and count of the steps that nobody has taken yet; waits for them."""
        return (step.total_and_count() for step in self._steps)
