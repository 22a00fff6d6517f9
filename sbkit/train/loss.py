"""The loss of a micro-batch as sum and count, so that the mean over a whole step is exact.

Backward runs on sums, whose divisor is known only after every rank has contributed (see ``update``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch
from speechbrain.utils.autocast import TorchAutocast
from torch.utils._pytree import tree_map_only

from sbkit.errors import SbkitError
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

    @property
    def counts_nothing(self) -> bool:
        """Whether the host knows that the count is 0, as of a dummy batch: then it gives no gradient, NaN included."""
        return not isinstance(self.count, torch.Tensor) and self.count == 0

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


def _with_extras(extras: Extras | None, others: Extras | None) -> Extras | None:
    if not extras or not others:
        return extras or others
    both = dict(extras)
    for name, (total, count) in others.items():
        before = both.get(name, (0.0, 0.0))
        both[name] = before[0] + total, before[1] + count
    return both


class Computed(NamedTuple):
    """What a recipe computed from a micro-batch, and its loss as sums."""

    outputs: Outputs
    objectives: Objectives
    loss: Loss


def as_loss(value: Objectives, is_dummy: bool = False) -> Loss:
    """Convert the result of ``compute_objectives`` to sums in fp32.

    A plain scalar keeps SpeechBrain's meaning: each micro-batch counts as one. A dummy batch counts as none.
    """
    loss = value if isinstance(value, Loss) else Loss(value, 1.0)
    one_number(loss.total, "compute_objectives", only_tensor=True)
    if isinstance(loss.count, (int, float)) and loss.count < 0:
        raise SbkitError("bad-loss",
                         f"compute_objectives returned sbkit.Loss with a count of {loss.count}",
                         hint="0 is the least")
    total = loss.total.float() if loss.total.dtype in _HALF else loss.total
    loss = loss._replace(total=total.reshape(()))
    if not is_dummy:
        return loss
    extras = {name: (torch.zeros_like(loss.total), 0.0) for name in loss.extras or {}}
    # A 0 that still depends on the parameters: backward has to reach those that it reaches on ranks with data.
    never = torch.zeros_like(loss.total, dtype=torch.bool)
    return Loss(torch.where(never, loss.total, 0.0), 0.0, extras)


def losses_in_fp32(outputs: T, context: TorchAutocast) -> T:
    """Convert half-precision outputs of ``compute_forward`` to fp32, also in lists, tuples and dicts, under autocast.

    Layers that are called in ``compute_objectives`` still run in half precision, because autocast is on there too.
    """
    if not isinstance(context.context, torch.autocast):
        return outputs
    return tree_map_only(torch.Tensor, lambda tensor: tensor.float() if tensor.dtype in _HALF else tensor, outputs)


class Mean:
    """A mean as sum and count, or a value set by a recipe."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0.0
        self._value_without_sums = 0.0

    def add(self, total: float, count: float) -> None:
        """Add a sum and its count, unless the sum is not finite."""
        if math.isfinite(total):
            self.total += total
            self.count += count

    def set(self, value: float) -> None:
        """Discard sums and set a value, which sums added later replace."""
        self.total = self.count = 0.0
        self._value_without_sums = value

    def known(self) -> float | None:
        """Return the mean; None before there is one."""
        return self.value() if self.count or self._value_without_sums else None

    def value(self, more: Iterable[tuple[float, float]] = ()) -> float:
        """Return the mean, including further sums that are not added permanently."""
        whole = Mean()
        for total, count in [(self.total, self.count), *more]:
            whole.add(total, count)
        return whole.total / whole.count if whole.count else self._value_without_sums


def one_number(loss: Loss | torch.Tensor | float, method: str, only_tensor: bool = False) -> torch.Tensor:
    """Convert the loss that a method of a recipe returned to a tensor with one element, or raise an error.

    method : its name, for the error
    only_tensor : whether a plain number is refused, too
    """
    if isinstance(loss, Loss):
        loss = loss.mean
    if not only_tensor and not isinstance(loss, torch.Tensor):
        with contextlib.suppress(TypeError, ValueError):  # what is no number
            loss = torch.tensor(float(loss))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise SbkitError("bad-loss", f"{method} returned a loss of {shape}, not one number",
                         hint="return a scalar tensor or sbkit.Loss(total, count)")
    return loss
