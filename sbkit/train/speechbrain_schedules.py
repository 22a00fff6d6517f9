"""SpeechBrain's schedulers of the learning rate, called as its recipes call them."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

from torch.optim import Optimizer

from sbkit.train.rates import set_base_rate

logger = logging.getLogger(__name__)

#: The arguments with which SpeechBrain's recipes call schedulers: some after each optimizer step, some after each
#: validation.
_PER_STEP = (("opt",), ("opt", "num_updates"))
_PER_EPOCH = (("metric_value",), ("current_epoch",), ("optim_list", "current_epoch", "current_loss"))
#: The names that its schedulers have for the steps of their warm-up.
_WARMUPS = ("n_warmup_steps", "num_warmup_steps", "warmup_steps", "warmup")


class _CalledAsSpeechBrains(type):
    def __instancecheck__(cls, other: object) -> bool:
        return hasattr(type(other), "on_batch_end") or _called_with(type(other)) in (*_PER_STEP, *_PER_EPOCH)


class SpeechBrainScheduler(metaclass=_CalledAsSpeechBrains):
    """The class of all schedulers of ``speechbrain.nnet.schedulers``, and of others that are called in the same way."""


def _called_with(kind: type) -> tuple[str, ...]:
    """Return the names of the arguments with which an object of a class is called; empty if it can't be."""
    call = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
    return tuple(inspect.signature(call).parameters)[1:] if inspect.isfunction(call) else ()


class Annealing:
    """Calls a scheduler of SpeechBrain as its recipes do, and gives its rate to all groups, times their ``lr_scale``.

    Its state is the scheduler's own, which checkpoints hold.
    """

    def __init__(self, scheduler: Any):  # a SpeechBrainScheduler
        self.scheduler = scheduler
        self.called_with = _called_with(type(scheduler))
        self.per_step = hasattr(scheduler, "on_batch_end") or self.called_with in _PER_STEP

    def log_limits(self, steps: int) -> None:
        """Warn of a warm-up that is longer than a run of this many steps."""
        for name in _WARMUPS:
            warmup = vars(self.scheduler).get(name, 0)
            if warmup > steps:
                logger.warning("The warm-up takes %d steps and the run has %d: set a lower schedule.%s", warmup, steps,
                               name)

    def after_step(self, optimizer: Optimizer, updates: int) -> None:
        """Set the rate of the next step; ``updates``: the steps so far."""
        if not self.per_step:
            return
        set_rate = getattr(self.scheduler, "on_batch_end", self.scheduler)
        one_group = _with_one_group(optimizer)
        if "num_updates" in self.called_with:
            set_rate(one_group, updates)
        else:
            set_rate(one_group)
        set_base_rate(optimizer, one_group.param_groups[0]["lr"])

    def after_validation(self, optimizer: Optimizer, epoch: int, loss: float) -> None:
        """Set the rate of the next epoch."""
        if self.per_step:
            return
        arguments = {"metric_value": loss, "current_loss": loss, "current_epoch": epoch,
                     "optim_list": [_with_one_group(optimizer)]}
        _, next_rate = self.scheduler(*(arguments[name] for name in self.called_with))
        set_base_rate(optimizer, next_rate)


def _with_one_group(optimizer: Optimizer) -> SimpleNamespace:
    """Return what schedulers need of an optimizer: one group, at the base rate."""
    first = optimizer.param_groups[0]
    rate = float(first["lr"]) / first.get("lr_scale", 1.0)
    return SimpleNamespace(param_groups=[{"lr": rate}])
