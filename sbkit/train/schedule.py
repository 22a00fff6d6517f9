"""sbkit's schedule of the learning rate: a function of the optimizer step and the model's progress, without a state.

It decides the base rate of a step; ``rates`` says what else does.
"""

from __future__ import annotations

import logging
import math
from typing import Literal, get_args

import torch

from sbkit.errors import SbkitError
from sbkit.train.rates import set_base_rate

logger = logging.getLogger(__name__)

Shape = Literal["cosine", "linear", "noam", "constant"]

#: The limit of ``max_lr_at_chance`` is lifted between these scores of a model; 0 is chance, 1 is a loss of 0.
LIFTED = (0.1, 0.4)


class Schedule:
    """A learning rate that warms up linearly and then decays.

    peak : float
        The highest learning rate.
    warmup : float
        Steps until ``peak``; a value below 1 is a share of the run.
    shape : str
        ``cosine`` or ``linear`` decay to ``final`` at the last step of the run; ``noam`` (inverse square
        root, independent of the length of the run); ``constant``.
    final : float
        The rate at the end of ``cosine`` and ``linear``, as a share of ``peak``.
    max_rise_per_step : float, optional
        Limits how fast the rate rises in a warm-up that is a share of the run. A peak that is too high for that is
        reached later; one that couldn't be reached in the first half of the run is lowered.
    max_lr_at_chance : float, optional
        The highest rate while the model's loss is at chance (see ``set_score``). The limit is lifted as the model
        learns: a rate that suits a model that learns can be too high for one that has yet to begin.

    Example
    -------
    >>> schedule = Schedule(peak=1.0, warmup=10, shape="linear")
    >>> schedule.total_steps = 110
    >>> [schedule(step) for step in (1, 10, 60, 110)]
    [0.1, 1.0, 0.5, 0.0]
    """

    def __init__(self, peak: float, warmup: float = 0.1, shape: Shape = "cosine", final: float = 0.0,
                 max_rise_per_step: float | None = None, max_lr_at_chance: float | None = None):
        if shape not in get_args(Shape):
            raise SbkitError("bad-value", f"schedule shape {shape!r} is not one of {', '.join(get_args(Shape))}",
                             key="shape", value=shape)
        if not peak >= 0:
            raise SbkitError("bad-value", f"schedule peak is {peak:g}, but can't be below 0",
                             hint="write a number above 0: in most recipes it is the key lr", key="peak", value=peak)
        if not warmup >= 0:
            raise SbkitError("bad-value", f"schedule warmup is {warmup:g}, but can't be below 0",
                             hint="write a share of the run, such as 0.2, or steps; 0: none",
                             key="warmup", value=warmup)
        for name, value, problem in (("max_rise_per_step", max_rise_per_step, "the rate could never rise"),
                                     ("max_lr_at_chance", max_lr_at_chance, "nothing could be learnt")):
            if value is not None and value <= 0:
                raise SbkitError("bad-value", f"schedule {name} is {value:g}, so {problem}",
                                 hint="write a number above 0, or null for none", key=name, value=value)
        self.peak = peak
        self.warmup = warmup
        self.shape = shape
        self.final = final
        self.max_rise_per_step = max_rise_per_step
        self.max_lr_at_chance = max_lr_at_chance
        self.total_steps = 0
        """The steps of the run, set once its length is known."""
        self.limit = math.inf
        """The highest rate for what the model has learnt so far; none unless ``set_score`` sets it."""

    def __call__(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 1."""
        warmup, peak = self.warmup_end()
        if step < warmup:
            return peak * step / warmup
        if self.shape == "constant":
            return peak
        if self.shape == "noam":
            return peak * math.sqrt(warmup / step)
        progress = min(1.0, (step - warmup) / max(1.0, self.total_steps - warmup))
        remaining = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return peak * (self.final + (1 - self.final) * remaining)

    def warmup_end(self) -> tuple[float, float]:
        """Return the steps of the warm-up, and the rate at its end."""
        warmup = max(1.0, self.warmup if self.warmup >= 1 else self.warmup * self.total_steps)
        if self.max_rise_per_step is None or self.warmup >= 1 or self.peak <= self.max_rise_per_step * warmup:
            return warmup, self.peak
        longest = max(warmup, self.total_steps / 2)
        steps = min(self.peak / self.max_rise_per_step, longest)
        rate = min(self.peak, self.max_rise_per_step * longest)
        return steps, rate

    @property
    def limits_warmup(self) -> bool:
        """Whether ``max_rise_per_step`` makes the warm-up longer or its end lower than ``warmup`` and ``peak`` say."""
        warmup, peak = self.warmup_end()
        return peak < self.peak or (self.warmup < 1 and warmup > max(1.0, self.warmup * self.total_steps))

    def set_score(self, score: float) -> None:
        """Set the limit for a model's score, between 0 (chance) and 1 (no loss)."""
        self.limit = math.inf if self.max_lr_at_chance is None else self.limit_at(score)

    def limit_at(self, score: float) -> float:
        """Return the highest rate for a model of this score."""
        share = (score - LIFTED[0]) / (LIFTED[1] - LIFTED[0])
        if self.max_lr_at_chance is None or share >= 1:
            return math.inf
        _, peak = self.warmup_end()
        return self.max_lr_at_chance + max(0.0, share) * max(0.0, peak - self.max_lr_at_chance)

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set the base rate for optimizer step ``step``, and return it; see ``rates``."""
        rate = min(self(step), self.limit)
        set_base_rate(optimizer, rate)
        return rate


def log_limits(schedule: Schedule, steps: int, tracks_learning: bool) -> None:
    """Log where a schedule's peak is out of reach in a run of this many steps, or a limit has no effect.

    tracks_learning : whether the loss can be compared with chance
    """
    if schedule.limits_warmup:
        _log_limited_warmup(schedule)
    if schedule.max_lr_at_chance is not None and not tracks_learning:
        _warn_of_limit_without_effect()
    warmup, _ = schedule.warmup_end()
    if warmup > steps:
        _warn_of_long_warmup(schedule, warmup, steps)


def _log_limited_warmup(schedule: Schedule) -> None:
    """Log how ``max_rise_per_step`` changes the warm-up; a warning if the peak is less than half of the recipe's."""
    steps, rate = schedule.warmup_end()
    lowered = ""
    if rate != schedule.peak:
        lowered = (f", so it doesn't reach the {schedule.peak:g} of the recipe; schedule.max_rise_per_step null "
                   "removes the limit")
    limited_at_chance = ""
    if schedule.limit_at(0) < rate:
        limited_at_chance = (f"; while the loss is at chance, to {schedule.max_lr_at_chance:g} "
                             "(schedule.max_lr_at_chance)")
    logger.log(logging.WARNING if rate < schedule.peak / 2 else logging.INFO,
               "The learning rate rises by at most %g a step (schedule.max_rise_per_step): to %.3g in %d steps%s%s",
               schedule.max_rise_per_step, rate, steps, lowered, limited_at_chance)


def _warn_of_limit_without_effect() -> None:
    logger.warning("schedule.max_lr_at_chance has no effect here: it needs a recogniser whose loss has a part per "
                   "token (LearningMonitor), and a step that isn't overridden; leave it out")


def _warn_of_long_warmup(schedule: Schedule, warmup: float, steps: int) -> None:
    logger.warning("The warm-up takes %d steps and the run has %d, so the learning rate reaches only %.3g of %g: "
                   "use a shorter one, such as --schedule.warmup 0.2, a share of the run",
                   warmup, steps, schedule(steps), schedule.peak)
