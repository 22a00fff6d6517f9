"""Learning rate schedules as pure functions of the optimizer step, with no state to save."""

from __future__ import annotations

import math

import torch

from sbkit.errors import SbkitError

_SHAPES = ("cosine", "linear", "noam", "constant")


class Schedule:
    """A learning rate that warms up linearly and then decays.

    Arguments
    ---------
    peak : float
        The highest learning rate.
    warmup : float
        Steps until ``peak``; a value below 1 is a share of the run.
    shape : str
        ``cosine`` or ``linear`` decay to ``final`` at the last step of the run; ``noam`` (inverse square
        root, independent of the length of the run); ``constant``.
    final : float
        The rate at the end of ``cosine`` and ``linear``, as a share of ``peak``.

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
        self.total_steps = 0  # set once the length of the run is known

    def __call__(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 1."""
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
        """Set the rate for optimizer step ``step``, times ``lr_scale`` for groups that have one, and return it."""
        lr = self(step)
        for group in optimizer.param_groups:
            scaled = lr * group.get("lr_scale", 1.0)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(scaled)
            else:
                group["lr"] = scaled
        return lr
