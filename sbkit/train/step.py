"""One optimizer step: the losses of its micro-batches become one exact mean, one clip, one update.

Backward runs on sums. What they are to be divided by is known on the device only, and only when every
rank has contributed, so the gradients are multiplied once, right before the update, by one factor

    world / (count over all ranks and micro-batches)  x  1 / loss scale (fp16)  x  clip factor

(``world`` since gradients arrive averaged over ranks). In fp16 gradients of a sum would overflow where those of a
mean do not, so sums are made nearly a mean by the count of the step before, a power of two that the factor undoes
exactly. Whether anything was not finite is found on the device too and handed to the fused optimizer, which then
leaves parameters and states alone. What a person or the training loop wants to know of a step is copied aside and
read one step later. No host sync.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from sbkit.errors import SbkitError
from sbkit.nn.peek import Peek
from sbkit.train.optim import apply, gradients, total_norm
from sbkit.train.precision import Scaler


class Loss(NamedTuple):
    """What ``compute_objectives`` may return instead of a scalar, to make the mean over a step exact.

    total: sum of the loss over what the mean is taken over (utterances, tokens, frames ...), a scalar tensor
    count: how many of them, a number or a scalar tensor
    extras: parts worth showing, ``{"name": (sum, count), ...}``; they do not enter the gradient
    """

    total: torch.Tensor
    count: torch.Tensor | float  # type: ignore[assignment]  # of a tuple it hides a method that nobody calls
    extras: Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]] | None = None

    @property
    def mean(self) -> torch.Tensor:
        return self.total / self.count

    @property
    def weightless(self) -> bool:
        """A stand-in's: it must not be seen in any gradient. Known on the host."""
        return not isinstance(self.count, torch.Tensor) and self.count == 0

    def detach(self) -> Loss:
        extras = {k: (_detached(s), _detached(n)) for k, (s, n) in (self.extras or {}).items()}
        return Loss(_detached(self.total), _detached(self.count), extras or None)


def as_loss(value: Any, weight: float = 1.0) -> Loss:
    """Whatever ``compute_objectives`` returned, as sums in fp32; a batch of weight 0 counts for nothing.

    A plain scalar keeps SpeechBrain's meaning: each micro-batch counts as one.
    """
    loss = value if isinstance(value, Loss) else Loss(value, 1.0)
    if not isinstance(loss.total, torch.Tensor) or loss.total.numel() != 1:
        shape = tuple(loss.total.shape) if isinstance(loss.total, torch.Tensor) else type(loss.total).__name__
        raise SbkitError(f"compute_objectives returned a loss of {shape}, not one number",
                         hint="return a scalar tensor or sbkit.Loss(total, count)")
    total = loss.total.float() if loss.total.dtype in (torch.float16, torch.bfloat16) else loss.total
    loss = loss._replace(total=total.reshape(()))
    if weight == 0:
        extras = {name: (torch.zeros_like(loss.total), 0.0) for name in loss.extras or {}}
        return Loss(torch.where(torch.zeros_like(loss.total, dtype=torch.bool), loss.total, 0.0), 0.0, extras)
    return loss


@dataclass
class Facts:
    """What is known of one optimizer step once its values have come from the device."""

    total: float  # loss, summed over ranks and micro-batches
    count: float
    norm: float  # of the gradient of the mean, before clipping
    skipped: bool  # something was not finite, so nothing was updated
    scale: float  # of a mean (1 unless fp16)
    sum_scale: float  # what sums were multiplied by besides (1 unless fp16)
    flags: dict[str, float]  # how many ranks raised each flag
    extras: dict[str, tuple[float, float]]
    batches: list[Any] = field(repr=False, default_factory=list)  # this rank's micro-batches
    number: int = 0  # of the optimizer step, from 1
    late: int = 0  # steps that were done since, when its values came

    @property
    def loss(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def to_blame(self) -> bool:
        """Not finite, and not merely a loss scale that was tried too high."""
        return not math.isfinite(self.total) or (self.skipped and self.scale <= 1.0)


class Step:
    """Gathers micro-batches into optimizer steps.

        step.add(loss)                  # each micro-batch, before its backward
        step.announce(flags)            # the last one: sums go round while backward runs
        step.scaled(loss).backward()
        step.update(optimizers, max_norm)
        for facts in step.facts(): ...  # of the steps before

    Arguments
    ---------
    device: where losses live
    world: ranks that average their gradients
    scaler: of the loss, enabled for fp16
    flags: names of things that any rank may raise and all must hear of
    """

    def __init__(self, device: torch.device, world: int = 1, scaler: Scaler | None = None,
                 flags: Sequence[str] = ()):
        self.device, self.world, self.scaler, self.flag_names = device, world, scaler, list(flags)
        self.batches: list[Any] = []
        self._sums: torch.Tensor | None = None
        self._sum_scale: torch.Tensor | None = None
        self._extras: list[str] = []
        self._work: dist.Work | None = None
        self._announced = False
        self._pending: list[tuple[Peek, Facts]] = []
        self._normalised = False
        self.number = 0

    @property
    def started(self) -> bool:
        """True while micro-batches wait for their update."""
        return self._sums is not None

    @property
    def announced(self) -> bool:
        """True once the last micro-batch's sums are on their way to the other ranks."""
        return self._announced

    def reset(self) -> None:
        """Forget the micro-batches counted so far."""
        self._sums, self._work, self._announced, self._normalised, self.batches = None, None, False, False, []
        self._sum_scale = None

    def add(self, loss: Loss, batch: Any = None) -> None:
        """Count one micro-batch in."""
        extras = loss.extras or {}
        if self._sums is None:
            self._extras = sorted(extras)
        elif sorted(extras) != self._extras:
            raise SbkitError(f"the micro-batches of one step return different extras: {sorted(extras)} "
                             f"and {self._extras}", hint="return the same names each time")
        values = [loss.total, loss.count]
        for name in self._extras:
            values += extras[name]
        row = torch.stack([self._scalar(v) for v in values])
        if self._sums is None:
            self._sum_scale = self._sum_scale_of(row[1])
        self._sums = row if self._sums is None else self._sums + row
        if batch is not None:
            self.batches.append(batch)

    def _scalar(self, value: torch.Tensor | float) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.detach().reshape(()).to(device=self.device, dtype=torch.float32)
        # full() is a kernel on the device; tensor() would copy from the host
        return torch.full((), float(value), dtype=torch.float32, device=self.device)

    def announce(self, flags: dict[str, bool] | None = None) -> None:
        """Send sums and flags round all ranks; returns at once, ``update`` waits on the device."""
        if self._announced or self._sums is None:
            return
        raised = torch.zeros(len(self.flag_names), device=self.device)
        for i, name in enumerate(self.flag_names):
            if flags and flags.get(name):
                raised[i].fill_(1.0)
        self._sums = torch.cat([self._sums, raised])
        if self.world > 1:
            self._work = dist.all_reduce(self._sums, async_op=True)
        self._announced = True

    def _sum_scale_of(self, count: torch.Tensor) -> torch.Tensor | None:
        """What fp16 multiplies this step's sums by, the same on all ranks; a run's first counts go round for it."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        if self.scaler.sum_scale is None:
            count = count.clone()
            if self.world > 1:
                dist.all_reduce(count)
            self.scaler.follow(count / self.world)
        return self.scaler.sum_scale

    def scaled(self, loss: Loss) -> torch.Tensor:
        """What ``backward`` is called on."""
        if self._sum_scale is None or self.scaler is None:
            return loss.total
        return self.scaler.scale(loss.total * self._sum_scale)

    def _factor(self) -> torch.Tensor | None:
        """What makes the summed gradients those of the mean; None when nothing is left to divide."""
        if self._sums is None or self._normalised:
            return None
        self.announce()
        if self._work is not None:
            self._work.wait()
            self._work = None
        count = self._sums[1]
        # A step of stand-ins only has count 0 and gradient 0.
        factor = torch.where(count > 0, self.world / count, torch.zeros_like(count))
        if self._sum_scale is None or self.scaler is None:
            return factor
        self.scaler.follow(count / self.world)
        return factor / self._sum_scale

    def normalise(self, optimizers: Iterable[Optimizer]) -> None:
        """Only divide: for a recipe with an ``optimizers_step`` of its own, which expects mean gradients."""
        factor, grads = self._factor(), gradients(optimizers)
        if factor is not None and grads:
            torch._foreach_mul_(grads, factor)
        self._normalised = self._sums is not None

    def update(self, optimizers: Iterable[Optimizer], max_norm: float | None) -> torch.Tensor:
        """Normalise, clip all gradients of all optimizers together, update unless one is not finite.

        Gives a scalar on the device: 1 where the step was skipped, else 0.
        """
        optimizers = list(optimizers)
        grads = gradients(optimizers)
        factor = self._factor()
        scale = self.scaler.factor() if self.scaler is not None else None
        multiplier = torch.ones((), device=self.device) if factor is None else factor
        if scale is not None:
            multiplier = multiplier / scale
        norm = total_norm(grads, self.device) * multiplier
        finite = torch.isfinite(norm)
        if self._sums is not None:
            finite = finite & torch.isfinite(self._sums[0])
        if max_norm is not None and max_norm > 0:
            multiplier = multiplier * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        found_inf = (~finite).float()
        apply(optimizers, multiplier, found_inf)
        self._keep_facts(norm, found_inf, scale)
        if self.scaler is not None and scale is not None:
            self.scaler.adjust(found_inf)
        return found_inf

    def passed(self) -> None:
        """A recipe updated its parameters by itself: keep what is known of the step, and begin the next."""
        unknown = torch.zeros((), device=self.device)
        self._keep_facts(unknown, unknown, None)

    def _keep_facts(self, norm: torch.Tensor, found_inf: torch.Tensor, scale: torch.Tensor | None) -> None:
        self.number += 1
        ones = torch.ones((), device=self.device)
        tail = torch.stack([norm.float(), found_inf, ones if scale is None else scale.float(),
                            ones if self._sum_scale is None else self._sum_scale])
        sums = self._sums if self._sums is not None else torch.zeros(0, device=self.device)
        facts = Facts(0.0, 0.0, 0.0, False, 1.0, 1.0, {}, dict.fromkeys(self._extras, (0.0, 0.0)),
                      self.batches, self.number)
        self._pending.append((Peek(torch.cat([tail, sums])), facts))
        self.reset()

    def facts(self, wait: bool = False) -> list[Facts]:
        """Take the steps whose values may be looked at: all but the newest, or all (``wait``).

        Which ones depends on the number of steps alone, so every rank decides on the same ones at the same
        point. On the CPU nothing runs behind our back, so there the newest one may be taken as well.
        """
        ready = len(self._pending) - (0 if wait or self.device.type == "cpu" else 1)
        taken, self._pending = self._pending[:max(ready, 0)], self._pending[max(ready, 0):]
        return [self._read(*entry) for entry in taken]

    def peek(self) -> list[Facts]:
        """The steps that ``facts`` has not given yet; waits for the device, and leaves them to be taken."""
        return [self._read(*entry) for entry in self._pending]

    def _read(self, arrived: Peek, facts: Facts) -> Facts:
        values = arrived.numpy().tolist()
        facts.late = self.number - facts.number
        facts.norm, facts.skipped, facts.scale, facts.sum_scale = values[0], values[1] > 0, values[2], values[3]
        if len(values) == 4:  # a recipe's own fit_batch, whose losses were never counted here
            return facts
        facts.total, facts.count = values[4:6]
        rest = values[6:]
        for i, name in enumerate(facts.extras):
            facts.extras[name] = (rest[2 * i], rest[2 * i + 1])
        facts.flags = dict(zip(self.flag_names, rest[2 * len(facts.extras):], strict=True))
        return facts


@overload
def _detached(value: torch.Tensor) -> torch.Tensor: ...
@overload
def _detached(value: torch.Tensor | float) -> torch.Tensor | float: ...
def _detached(value: torch.Tensor | float) -> torch.Tensor | float:
    return value.detach() if isinstance(value, torch.Tensor) else value
