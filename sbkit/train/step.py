"""One optimizer step: the exact mean over its micro-batches, clipped once, applied in one update.

Backward runs on sums. Their divisor is known only on the device, and only after every rank has contributed,
so the gradients are multiplied once, right before the update, by one factor

    world / (count over all ranks and micro-batches)  x  1 / loss scale (fp16)  x  clip factor

(``world`` because gradients arrive averaged over ranks). In fp16 the gradients of a sum would overflow where those
of a mean do not. So sums are first scaled by a power of two near the count of the previous step; the factor undoes
this exactly. The check for values that are not finite also runs on the device, and its result goes to the fused
optimizer, which then leaves parameters and states unchanged. Values that the log or the training loop needs are
copied to the host in the background and read one step later, so the host never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from sbkit.errors import SbkitError
from sbkit.nn.peek import Peek
from sbkit.train.batches import Objectives
from sbkit.train.optim import apply, gradients, total_norm
from sbkit.train.precision import Scaler

V = TypeVar("V", torch.Tensor, torch.Tensor | float)


class Loss(NamedTuple):
    """A loss as sum and count, returned by ``compute_objectives`` to make the mean over a step exact.

    total : scalar tensor, the sum over the units of the mean (utterances, tokens, frames ...)
    count : the number of units, a number or a scalar tensor
    extras : parts to show and log, ``{"name": (sum, count), ...}``; they do not enter the gradient
    """

    total: torch.Tensor
    count: torch.Tensor | float  # type: ignore[assignment]  # it hides a method of tuples that is not used here
    extras: Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]] | None = None

    @property
    def mean(self) -> torch.Tensor:
        return self.total / self.count

    @property
    def weightless(self) -> bool:
        """Whether this is the loss of a placeholder batch, which must not affect any gradient; known on the host."""
        return not isinstance(self.count, torch.Tensor) and self.count == 0

    def detach(self) -> Loss:
        extras = {k: (_detached(s), _detached(n)) for k, (s, n) in (self.extras or {}).items()}
        return Loss(_detached(self.total), _detached(self.count), extras or None)


def as_loss(value: Objectives, weight: float = 1.0) -> Loss:
    """Convert the result of ``compute_objectives`` to sums in fp32.

    A plain scalar keeps SpeechBrain's meaning: each micro-batch counts as one. A batch of weight 0 counts as none.
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
class StepResult:
    """The values of one optimizer step, after their copy from the device."""

    total: float  # loss, summed over ranks and micro-batches
    count: float
    norm: float  # gradient norm of the mean loss, before clipping
    skipped: bool  # not updated, because something was not finite
    scale: float  # loss scale of a mean (1 unless fp16)
    sum_scale: float  # additional factor of sums (1 unless fp16)
    flags: dict[str, float]  # how many ranks raised each flag
    extras: dict[str, tuple[float, float]]
    batches: list[Any] = field(repr=False, default_factory=list)  # this rank's micro-batches
    number: int = 0  # of the optimizer step, from 1
    late: int = 0  # number of steps taken before its values arrived

    @property
    def loss(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def failed(self) -> bool:
        """Whether the step was not finite for another reason than a loss scale that was tried too high."""
        return not math.isfinite(self.total) or (self.skipped and self.scale <= 1.0)


class StepAccumulator:
    """Gathers micro-batches into optimizer steps.

        step.add(loss)                  # each micro-batch, before its backward
        step.announce(flags)            # for the last one: sums are exchanged while backward runs
        step.scaled(loss).backward()
        step.update(optimizers, max_norm)
        for result in step.results(): ...  # of previous steps

    flags : names of flags that any rank may raise, and all ranks receive
    """

    def __init__(self, device: torch.device, world: int = 1, scaler: Scaler | None = None,
                 flags: Sequence[str] = ()):
        self.device, self.world, self.scaler, self.flag_names = device, world, scaler, list(flags)
        self.batches: list[Any] = []
        self._sums: torch.Tensor | None = None
        self._sum_scale: torch.Tensor | None = None
        self._extras: list[str] = []
        self._work: dist.Work | None = None
        self.announced = False
        """Whether the sums of the step are on their way to the other ranks."""
        self._pending: list[tuple[Peek, list[str], list[Any], int]] = []
        self._normalised = False
        self.number = 0

    @property
    def started(self) -> bool:
        """Whether micro-batches are waiting for their update."""
        return self._sums is not None

    def reset(self) -> None:
        """Discard the micro-batches added so far."""
        self._sums, self._work, self.announced, self._normalised, self.batches = None, None, False, False, []
        self._sum_scale, self._extras = None, []

    def add(self, loss: Loss, batch: object = None) -> None:
        """Add the loss of one micro-batch to the step."""
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
        # full() runs on the device; tensor() would copy from the host
        return torch.full((), float(value), dtype=torch.float32, device=self.device)

    def announce(self, flags: dict[str, bool] | None = None) -> None:
        """Start exchanging sums and flags between ranks, and return at once; ``update`` waits on the device."""
        if self.announced or self._sums is None:
            return
        raised = torch.zeros(len(self.flag_names), device=self.device)
        for i, name in enumerate(self.flag_names):
            if flags and flags.get(name):
                raised[i].fill_(1.0)
        self._sums = torch.cat([self._sums, raised])
        if self.world > 1:
            self._work = dist.all_reduce(self._sums, async_op=True)
        self.announced = True

    def _sum_scale_of(self, count: torch.Tensor) -> torch.Tensor | None:
        """Return the factor of this step's sums in fp16, the same on all ranks; the first step exchanges counts."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        if self.scaler.sum_scale is None:
            count = count.clone()
            if self.world > 1:
                dist.all_reduce(count)
            self.scaler.follow_count(count / self.world)
        return self.scaler.sum_scale

    def scaled(self, loss: Loss) -> torch.Tensor:
        """Return the tensor to call ``backward`` on."""
        if self._sum_scale is None or self.scaler is None:
            return loss.total
        return self.scaler.scale(loss.total * self._sum_scale)

    def _factor(self) -> torch.Tensor | None:
        """Return the factor from gradients of the sum to those of the mean; None if there is nothing to normalise."""
        if self._sums is None or self._normalised:
            return None
        self.announce()
        if self._work is not None:
            self._work.wait()
            self._work = None
        count = self._sums[1]
        # A step with only placeholder batches has count 0 and gradient 0.
        factor = torch.where(count > 0, self.world / count, torch.zeros_like(count))
        if self._sum_scale is None or self.scaler is None:
            return factor
        self.scaler.follow_count(count / self.world)
        return factor / self._sum_scale

    def normalise(self, optimizers: Iterable[Optimizer]) -> None:
        """Turn the gradients into those of the mean, for a recipe that overrides ``optimizers_step``."""
        factor, grads = self._factor(), gradients(optimizers)
        if factor is not None and grads:
            torch._foreach_mul_(grads, factor)
        self._normalised = self._sums is not None

    def update(self, optimizers: Iterable[Optimizer], max_norm: float | None, *,
               number: int | None = None) -> torch.Tensor:
        """Normalise and clip the gradients of all optimizers together, and update unless something is not finite.

        number : of the step in the whole run; None: the one after the last

        Returns a scalar on the device: 1 if the step was skipped, else 0.
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
        self._keep_result(norm, found_inf, scale, number)
        if self.scaler is not None and scale is not None:
            self.scaler.adjust(found_inf)
        return found_inf

    def end_without_update(self) -> None:
        """End a step whose update the recipe made itself, keeping its losses."""
        unknown = torch.zeros((), device=self.device)
        self._keep_result(unknown, unknown, None)

    def _keep_result(self, norm: torch.Tensor, found_inf: torch.Tensor, scale: torch.Tensor | None,
                     number: int | None = None) -> None:
        self.number = self.number + 1 if number is None else number
        ones = torch.ones((), device=self.device)
        tail = torch.stack([norm.float(), found_inf, ones if scale is None else scale.float(),
                            ones if self._sum_scale is None else self._sum_scale])
        values = tail if self._sums is None else torch.cat([tail, self._sums])
        self._pending.append((Peek(values), self._extras, self.batches, self.number))
        self.reset()

    def results(self, wait: bool = False) -> list[StepResult]:
        """Return the steps whose values have arrived, and forget them: all but the newest, or all with ``wait``.

        This depends only on the number of steps, so all ranks get the same steps at the same point. On the CPU
        nothing runs in the background, so the newest step is included.
        """
        ready = len(self._pending) - (0 if wait or self.device.type == "cpu" else 1)
        taken, self._pending = self._pending[:max(ready, 0)], self._pending[max(ready, 0):]
        return [self._read(*entry) for entry in taken]

    def peek(self) -> list[StepResult]:
        """Return the steps that ``results`` has not returned yet, without forgetting them; waits for the device."""
        return [self._read(*entry) for entry in self._pending]

    def _read(self, arrived: Peek, names: list[str], batches: list[Any], number: int) -> StepResult:
        norm, skipped, scale, sum_scale, *sums = arrived.numpy().tolist()
        total, count, *rest = sums or [0.0, 0.0]  # a recipe's own fit_batch did not add its losses
        extras = {name: (rest[2 * i], rest[2 * i + 1]) for i, name in enumerate(names)}
        flags = dict(zip(self.flag_names, rest[2 * len(names):], strict=True)) if sums else {}
        return StepResult(total, count, norm, skipped > 0, scale, sum_scale, flags, extras, batches, number,
                          late=self.number - number)


def _detached(value: V) -> V:
    return value.detach() if isinstance(value, torch.Tensor) else value
