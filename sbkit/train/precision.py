"""How losses and gradients are scaled in a precision: not at all in fp32 and bf16, by two factors in fp16.

Which precision a run has is decided by its options (``options.precisions``); autocast applies it to layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from sbkit.train.distributed import ranks


class Scaler(GradScaler):
    """torch's loss scaler, for steps that check for infinities themselves and for losses that are sums.

    The scale is made for a mean. Sums are also multiplied by ``sum_scale``, 1 / count or a little less; otherwise the
    initial scale would be hundreds of times too high, and halve with every step that it spoils. ``sum_scale`` is a
    power of two, so dividing by it is exact, and a tensor on the device, so nothing waits for it.
    """

    sum_scale: torch.Tensor | None = None

    def follow_count(self, count: torch.Tensor) -> None:
        """Adapt ``sum_scale`` to sums over ``count``, a scalar on the device, unless that is 0 or not finite."""
        mean = 1 / count
        scale = mean / (2 * torch.frexp(mean).mantissa)  # the power of two below
        if self.sum_scale is None:
            self.sum_scale = torch.ones_like(scale)
        # In place: a captured step knows it by its address.
        torch.where((count > 0) & torch.isfinite(count), scale, self.sum_scale, out=self.sum_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state and ``sum_scale``."""
        own = {} if self.sum_scale is None else {"sum_scale": float(self.sum_scale)}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or of torch's scaler, which has no ``sum_scale``."""
        super().load_state_dict(dict(state))
        if "sum_scale" in state:
            self.sum_scale = torch.full((), state["sum_scale"], device=self._device)

    def adjust(self, found_inf: torch.Tensor) -> None:
        """Update the scale after a step, as torch's ``update`` does; ``found_inf`` is 1 if the step was skipped."""
        assert self._scale is not None and self._growth_tracker is not None, "a loss was scaled"
        torch._amp_update_scale_(
            self._scale, self._growth_tracker, found_inf,
            self._growth_factor, self._backoff_factor, self._growth_interval,
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that steps write in place."""
        return [tensor for tensor in (self._scale, self._growth_tracker, self.sum_scale) if tensor is not None]

    def factor(self) -> torch.Tensor | None:
        """Return the loss scale, on the device; None if losses are not scaled."""
        return self._get_scale_async() if self.is_enabled() else None

    def gradient_scale(self) -> torch.Tensor | None:
        """Return the factor of gradients, of the loss scale and ``sum_scale``, as a copy that later steps don't change;
        None if losses are not scaled."""
        scale = self.factor()
        if scale is None:
            return None
        return scale.clone() if self.sum_scale is None else scale * self.sum_scale


class Precision(Protocol):
    """How a run's losses and gradients are scaled. A step calls its methods in this order."""

    def begin(self, count: torch.Tensor) -> None:
        """Prepare for the first loss of a run, a sum over ``count`` units."""

    def scaled(self, total: torch.Tensor) -> torch.Tensor:
        """Return the sum of losses that backward begins with."""

    def unscaled(self, factor: torch.Tensor) -> torch.Tensor:
        """Return a factor of gradients that also takes their scale away."""

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss scale of a mean, and the further factor of sums."""

    def adjust(self, failed: torch.Tensor) -> None:
        """Adapt the scale to whether a step was not finite: 1 if so, else 0."""

    def follow_count(self, count: torch.Tensor) -> None:
        """Adapt the factor of sums to the count of a step, divided by the ranks."""

    def gradient_scale(self) -> torch.Tensor:
        """Return the factor of gradients, as a copy that later steps don't change."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that ``adjust`` and ``follow_count`` write in place."""


class Unscaled:
    """fp32 and bf16: their gradients need no scale."""

    def __init__(self, device: torch.device):
        self._one = torch.ones((), device=device)

    def begin(self, count: torch.Tensor) -> None:
        pass

    def scaled(self, total: torch.Tensor) -> torch.Tensor:
        return total

    def unscaled(self, factor: torch.Tensor) -> torch.Tensor:
        return factor

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._one, self._one

    def adjust(self, failed: torch.Tensor) -> None:
        pass

    def follow_count(self, count: torch.Tensor) -> None:
        pass

    def gradient_scale(self) -> torch.Tensor:
        return self._one

    def tensors(self) -> list[torch.Tensor]:
        return []


class Scaled:
    """fp16: losses are scaled so that small gradients don't vanish, see ``Scaler``."""

    def __init__(self, scaler: Scaler):
        self.scaler = scaler

    def begin(self, count: torch.Tensor) -> None:
        # The factor of sums is by the count of the step before. The first step has none, so ranks exchange its counts.
        if self.scaler.sum_scale is None:
            self.scaler.follow_count(ranks.sum_across(count) / ranks.world_size())

    def scaled(self, total: torch.Tensor) -> torch.Tensor:
        assert self.scaler.sum_scale is not None, "begin comes first"
        return self.scaler.scale(total * self.scaler.sum_scale)

    def unscaled(self, factor: torch.Tensor) -> torch.Tensor:
        scale, sum_scale = self.scales()
        return factor / sum_scale / scale

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self.scaler.factor()
        assert scale is not None and self.scaler.sum_scale is not None, "a loss was scaled"
        return scale.float(), self.scaler.sum_scale

    def adjust(self, failed: torch.Tensor) -> None:
        self.scaler.adjust(failed)

    def follow_count(self, count: torch.Tensor) -> None:
        self.scaler.follow_count(count)

    def gradient_scale(self) -> torch.Tensor:
        scale = self.scaler.gradient_scale()
        assert scale is not None, "it is enabled"
        return scale

    def tensors(self) -> list[torch.Tensor]:
        return self.scaler.tensors()
