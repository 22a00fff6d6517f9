"""What a step is made of: the loss of a micro-batch as sum and count, the update, and what the host learns of it.

Backward runs on sums. Their divisor is known only on the device, and only after every rank has contributed,
so the gradients are multiplied once, right before the update, by one factor (see ``Trainer.train_step``)

    1 / count over all ranks and micro-batches  x  1 / loss scale (fp16)  x  clip factor
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from speechbrain.utils.autocast import TorchAutocast
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from sbkit.data.batch import PlannedBatch
from sbkit.errors import SbkitError
from sbkit.nn.device_numbers import DeviceNumbers
from sbkit.train.batches import Objectives, Outputs

T = TypeVar("T")
#: Named parts of a loss, each as sum and count.
Extras = Mapping[str, tuple["torch.Tensor | float", "torch.Tensor | float"]]
_HALF = (torch.float16, torch.bfloat16)


class Loss(NamedTuple):
    """A loss as sum and count, returned by ``compute_objectives`` to make the mean over a step exact.

    total : scalar tensor, the sum over the units of the mean (utterances, tokens, frames ...)
    count : the number of units, a number or a scalar tensor
    extras : parts to show and log, ``{"name": (sum, count), ...}``; they do not enter the gradient
    """

    total: torch.Tensor
    count: torch.Tensor | float  # type: ignore[assignment]  # it hides a method of tuples that is not used here
    extras: Extras | None = None

    @property
    def mean(self) -> torch.Tensor:
        return self.total / self.count

    # Not as a tuple's, which nobody wants here.
    def __mul__(self, factor: torch.Tensor | float) -> Loss:  # type: ignore[override]
        return self._replace(total=self.total * factor)

    def __rmul__(self, factor: torch.Tensor | float) -> Loss:  # type: ignore[override]
        return self * factor

    def __truediv__(self, divisor: torch.Tensor | float) -> Loss:
        return self._replace(total=self.total / divisor)

    def __add__(self, other: Loss | torch.Tensor | float) -> Loss:  # type: ignore[override]
        """Add another mean, of a Loss, or a number or scalar tensor such as a penalty.

        The extras of both stay; parts of the same name are one part, summed and counted together.
        """
        if not isinstance(other, Loss):
            return self._replace(total=self.total + other * self.count)
        return self._replace(total=self.total + other.mean * self.count, extras=_with_extras(self.extras, other.extras))

    def __radd__(self, other: Loss | torch.Tensor | float) -> Loss:
        return self + other

    def detach(self) -> Loss:
        extras = dict(self.extras) if self.extras else None
        return tree_map_only(torch.Tensor, torch.Tensor.detach, self._replace(extras=extras))


class Computed(NamedTuple):
    """What a recipe computed from a micro-batch, and its loss as sums."""

    outputs: Outputs
    objectives: Objectives
    loss: Loss


def row_of(loss: Loss, device: torch.device) -> tuple[torch.Tensor, list[str]]:
    """Return a loss, its count, then sum and count of each extra, as one tensor on the device, and the extras' names.

    Rows are summed over micro-batches and ranks without leaving the device.
    """
    extras = loss.extras or {}
    names = sorted(extras)
    numbers = [number for pair in ((loss.total, loss.count), *(extras[name] for name in names)) for number in pair]
    return torch.stack([_on(device, number) for number in numbers]), names


def _on(device: torch.device, number: torch.Tensor | float) -> torch.Tensor:
    if isinstance(number, torch.Tensor):
        return number.detach().reshape(()).to(device=device, dtype=torch.float32)
    return torch.full((), float(number), dtype=torch.float32, device=device)  # torch.tensor would copy from the host


class StepSums:
    """The rows of a step's micro-batches (see ``row_of``), summed on the device."""

    def __init__(self) -> None:
        self.row: torch.Tensor  # once there is a micro-batch
        self.names: list[str] = []
        self._begun = False

    def add(self, row: torch.Tensor, names: list[str]) -> None:
        """Add the row of a micro-batch; all of a step must have the same extras."""
        if not self._begun:
            self.row, self.names, self._begun = row, names, True
            return
        if names != self.names:
            raise SbkitError(f"the micro-batches of one step return different extras: {self.names} and {names}",
                             hint="return the same names each time")
        self.row = self.row + row


def _with_extras(extras: Extras | None, others: Extras | None) -> Extras | None:
    if not extras or not others:
        return extras or others
    both = dict(extras)
    for name, (total, count) in others.items():
        before = both.get(name, (0.0, 0.0))
        both[name] = before[0] + total, before[1] + count
    return both


def is_last(batch: object) -> bool | None:
    """Return whether a batch is the last of its step; None if it doesn't say, as only the batches of a plan do."""
    return batch.last if isinstance(batch, PlannedBatch) else None


def as_loss(value: Objectives, weight: float = 1.0) -> Loss:
    """Convert the result of ``compute_objectives`` to sums in fp32.

    A plain scalar keeps SpeechBrain's meaning: each micro-batch counts as one. A batch of weight 0 counts as none.
    """
    loss = value if isinstance(value, Loss) else Loss(value, 1.0)
    one_number(loss.total, "compute_objectives", tensor=True)
    if isinstance(loss.count, (int, float)) and loss.count < 0:
        raise SbkitError(f"compute_objectives returned sbkit.Loss with a count of {loss.count}", hint="0 is the least")
    total = loss.total.float() if loss.total.dtype in _HALF else loss.total
    loss = loss._replace(total=total.reshape(()))
    if weight == 0:
        extras = {name: (torch.zeros_like(loss.total), 0.0) for name in loss.extras or {}}
        return Loss(torch.where(torch.zeros_like(loss.total, dtype=torch.bool), loss.total, 0.0), 0.0, extras)
    return loss


def losses_in_fp32(outputs: T, context: TorchAutocast) -> T:
    """Convert half-precision outputs of ``compute_forward`` to fp32, also in lists, tuples and dicts, under autocast.

    Layers that are called in ``compute_objectives`` still run in half precision, because autocast is on there too.
    """
    if not isinstance(context.context, torch.autocast):
        return outputs
    return tree_map_only(torch.Tensor, lambda each: each.float() if each.dtype in _HALF else each, outputs)


def update(optimizers: Sequence[Optimizer], factor: torch.Tensor, max_norm: float | None,
           finite: torch.Tensor | None = None, rates: Sequence[Sequence[torch.Tensor] | None] = (),
           ) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply all gradients by ``factor``, clip those of each optimizer, and step, unless something is not finite.

    factor, finite : scalars on the device; ``finite`` is False if the step is to be skipped in any case, because its
        loss is not finite or counts nothing
    rates : what ``write_rates`` returned

    Returns the norm of the gradients before clipping, and 1 if the step was skipped, else 0; both on the device. Fused
    optimizers skip a step on the device. For others the host reads once whether to: this costs nothing on the CPU, and
    is the step's only wait on a GPU.
    """
    # A single fused optimizer multiplies while it reads the gradients.
    multiplies_itself = len(optimizers) == 1 and skips_itself(optimizers[0])
    norms: list[torch.Tensor] = []
    scale = factor
    scaled: set[int] = set()
    for optimizer in optimizers:
        grads = [grad for grad in gradients([optimizer]) if id(grad) not in scaled]  # one of two optimizers counts once
        scaled.update(map(id, grads))
        norms.append(_norm_of(grads, factor.device) * factor)
        if max_norm is not None and max_norm > 0:
            scale = factor * torch.clamp(max_norm / (norms[-1] + 1e-6), max=1.0)
        if grads and not multiplies_itself:
            torch._foreach_mul_(grads, scale)

    norm = torch.zeros_like(factor)  # if all optimizers are frozen
    if norms:
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    all_finite = torch.isfinite(norm) if finite is None else torch.isfinite(norm) & finite
    skipped = (~all_finite).float()

    skips: bool | None = None  # what the host has read of ``skipped``, if it had to
    for optimizer, rates_on_device in zip(optimizers, rates or [None] * len(optimizers), strict=True):
        if skips_itself(optimizer):
            _step_on_device(optimizer, 1 / scale if multiplies_itself else None, skipped, rates_on_device)
            continue
        if skips is None:
            skips = bool(skipped > 0)
        if not skips:
            optimizer.step()
    return norm, skipped


def _norm_of(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the norm of all gradients as one vector."""
    if not grads:
        return torch.zeros((), device=device)
    norm = torch.nn.utils.get_total_norm(grads, norm_type=2.0, error_if_nonfinite=False)
    if hasattr(norm, "full_tensor"):  # sharded parameters: the norm over all shards
        norm = norm.full_tensor()
    return norm.to(device=device, dtype=torch.float32)


def _step_on_device(optimizer: Optimizer, divisor: torch.Tensor | None, skipped: torch.Tensor,
                    rates: Sequence[torch.Tensor] | None) -> None:
    """Let a fused optimizer step, unless ``skipped`` is 1, with gradients divided by ``divisor``.

    rates : of its groups, on the device, for kernels; hooks and schedules know them as numbers. None: those
    """
    fused: Any = optimizer  # two attributes that only fused optimizers read
    fused.grad_scale, fused.found_inf = divisor, skipped
    numbers = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates or numbers, strict=True):
        group["lr"] = rate
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            group["lr"] = number


def write_rates(optimizers: Sequence[Optimizer], device: torch.device) -> list[Sequence[torch.Tensor] | None]:
    """Write the learning rates of groups to the device; return each optimizer's tensors, None if it has its own.

    Called after all hooks that may change a rate, and outside of what can be captured.
    """
    found: list[Sequence[torch.Tensor] | None] = []
    for optimizer in optimizers:
        rates = [group["lr"] for group in optimizer.param_groups]
        if not skips_itself(optimizer) or any(isinstance(rate, torch.Tensor) for rate in rates):
            found.append(None)
            continue
        numbers: DeviceNumbers | None = vars(optimizer).get("device_rates")
        if numbers is None or len(numbers.numbers) != len(rates):  # a recipe may add groups
            numbers = DeviceNumbers(rates, torch.float64 if device.type == "cpu" else torch.float32)
            vars(optimizer)["device_rates"] = numbers
        numbers.write(rates)
        found.append(numbers.on(device))
    return found


def skips_itself(optimizer: Optimizer) -> bool:
    """Return whether the optimizer checks ``found_inf`` on the device."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused") for group in optimizer.param_groups)


def gradients(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Return every gradient once, in a fixed order."""
    found: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    found[id(parameter)] = parameter.grad
    return list(found.values())


class StepResult(NamedTuple):
    """The values of one optimizer step, after their copy from the device."""

    total: float  # loss, summed over ranks and micro-batches
    count: float  # type: ignore[assignment]  # as above
    norm: float  # gradient norm of the mean loss, before clipping
    skipped: bool  # not updated, because something was not finite
    scale: float  # loss scale of a mean (1 unless fp16)
    sum_scale: float  # additional factor of sums (1 unless fp16)
    extras: dict[str, tuple[float, float]]
    batches: list[Any]  # this rank's micro-batches
    number: int  # of the optimizer step, from 1
    late: int = 0  # number of steps taken before its values arrived

    @property
    def loss(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def failed(self) -> bool:
        """Whether the step was not finite for another reason than a loss scale that was tried too high."""
        return not math.isfinite(self.total) or (self.skipped and self.scale <= 1.0)


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


def one_number(loss: Loss | torch.Tensor | float, method: str, tensor: bool = False) -> torch.Tensor:
    """Convert a loss of any kind, or a ``tensor`` alone, which a method returned, to a tensor with one element."""
    if isinstance(loss, Loss):
        loss = loss.mean
    with contextlib.suppress(TypeError, ValueError):  # what is no number
        loss = loss if tensor or isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise SbkitError(f"{method} returned a loss of {shape}, not one number",
                         hint="return a scalar tensor or sbkit.Loss(total, count)")
    return loss
