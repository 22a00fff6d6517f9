"""Learning rate as a pure function of the optimizer step: nothing to save, nothing to resume wrongly."""

from __future__ import annotations

import math

import torch

from sbkit.errors import SbkitError

_SHAPES = ("cosine", "linear", "noam", "constant")


class Schedule:
    """Warm up linearly, then come down.

    Arguments
    ---------
    peak : float
        The highest learning rate.
    warmup : float
        Steps to reach it; below 1 a share of the run.
    shape : str
        ``cosine`` or ``linear`` down to ``final`` at the run's last step; ``noam`` (inverse square
        root, independent of the run's length); ``constant``.
    final : float
        Where ``cosine`` and ``linear`` end, as a share of ``peak``.

    Example
    -------
    >>> schedule = Schedule(peak=1.0, warmup=10, shape="linear")
    >>> schedule.total_steps = 110
    >>> [schedule(step) for step in (1, 10, 60, 110)]
    [0.1, 1.0, 0.5, 0.0]
    """

    def __init__(self, peak: float, warmup: float = 0.1, shape: str = "cosine", final: float = 0.0):
        if shape not in _SHAPES:
            raise SbkitError(f"schedule shape {shape!r} is not one of {', '.join(_SHAPES)}")
        self.peak, self.warmup, self.shape, self.final = peak, warmup, shape, final
        self.total_steps = 0  # set when the run's length is known

    def __call__(self, step: int) -> float:
        """The learning rate of optimizer step ``step``, counted from 1."""
        warmup = self.warmup if self.warmup >= 1 else self.warmup * self.total_steps
        warmup = max(1.0, warmup)
        if step < warmup:
            return self.peak * step / warmup
        if self.shape == "constant":
            return self.peak
        if self.shape == "noam":
            return self.peak * math.sqrt(warmup / step)
        done = min(1.0, (step - warmup) / max(1.0, self.total_steps - warmup))
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.peak * (self.final + (1 - self.final) * left)

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set the rate for optimizer step ``step``; groups with an ``lr_scale`` keep their ratio."""
        lr = self(step)
        for group in optimizer.param_groups:
            scaled = lr * group.get("lr_scale", 1.0)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(scaled)
            else:
                group["lr"] = scaled
        return lr
