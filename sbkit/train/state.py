"""Where a run stands: the counters and flags that its steps go by, and what of them a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sbkit.train.monitor.tally import Mean


@dataclass
class TrainState:
    """Counters and flags of a run. A ``Brain`` owns one, and the loops beside it are given it."""

    step: int = 0
    """Micro-batches of this epoch, or batches of this evaluation."""
    optimizer_step: int = 0
    """Updates of the whole run."""
    nonfinite_count: int = 0
    """Steps of this epoch that changed nothing because something was not finite."""
    epoch: Any = None
    epoch_step: int = 0
    """Updates of this epoch."""
    epoch_steps: int | None = None
    """Updates that its plan has."""
    last_batch: int | None = None
    """The number of the epoch's last micro-batch, where it is known."""
    average: Mean = field(default_factory=Mean)
    """Of this epoch's training loss, as far as its steps are known on the host."""
    plan_driven: bool = False
    """The train set says itself where an optimizer step ends."""
    validates: bool = False
    """A validation follows each epoch."""
    first_step_checked: bool = False
    """What is looked at once, after a ``fit``'s first step, was."""
    graph_changes: bool = False
    """Backward reaches other parameters from step to step, so each one looks for what it does not reach."""
    told_dropped: bool = False
    """It was said that gradients are dropped at the end of an epoch."""
    _trained: tuple[int, int, Mean, int] | None = field(default=None, repr=False)

    def closes_step(self, batch: Any, accumulated: int) -> bool:
        """Whether this micro-batch is the last of its optimizer step; ``accumulated``: how many such a step has."""
        if self.step == self.last_batch:
            return True
        return batch.last if self.plan_driven else self.step % accumulated == 0

    def reached(self, limit: int | None) -> bool:
        """Whether as many updates were done as there should be."""
        return limit is not None and self.optimizer_step >= limit

    def end_training(self) -> None:
        """Count from 0 for what follows an epoch's training."""
        self._trained = (self.step, self.epoch_step, self.average, self.nonfinite_count)
        self.average = Mean()
        self.step = self.epoch_step = self.nonfinite_count = 0

    def back_to_training(self) -> None:
        """Stand where the epoch's training had ended."""
        if self._trained is None:
            raise RuntimeError("no epoch's training has ended")
        self.step, self.epoch_step, self.average, self.nonfinite_count = self._trained

    def state_dict(self, average: float) -> dict[str, Any]:
        """SpeechBrain's three keys, and what going on exactly needs; ``average``: of all losses so far."""
        return {
            "step": self.step, "avg_train_loss": average, "optimizer_step": self.optimizer_step,
            "epoch_step": self.epoch_step, "epoch_steps": self.epoch_steps,
            "loss_sums": [self.average.total, self.average.count],
            "nonfinite_count": self.nonfinite_count, "graph_changes": self.graph_changes,
        }

    def load_state_dict(self, saved: Mapping[str, Any], end_of_epoch: bool) -> None:
        """Go on from there; at the end of an epoch that is the beginning of the next one."""
        self.optimizer_step = saved.get("optimizer_step", saved["step"])
        self.graph_changes = saved.get("graph_changes", False)
        here: Mapping[str, Any] = {"step": 0, "avg_train_loss": 0.0} if end_of_epoch else saved
        self.step, self.epoch_step = here["step"], here.get("epoch_step", 0)
        self.epoch_steps = here.get("epoch_steps")
        self.nonfinite_count = here.get("nonfinite_count", 0)
        self.average.set(float(here["avg_train_loss"]))
        self.average.total, self.average.count = here.get("loss_sums", (0.0, 0.0))


class Counter:
    """An attribute of a Brain that SpeechBrain documents and ``TrainState`` keeps."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, brain: Any, owner: type) -> Any:
        return self if brain is None else getattr(brain.train_state, self._name)

    def __set__(self, brain: Any, value: int) -> None:
        setattr(brain.train_state, self._name, value)


@dataclass(frozen=True)
class Overrides:
    """Which methods of the contract a recipe has written itself."""

    fit_batch: bool
    optimizers_step: bool
    update_average: bool

    @classmethod
    def of(cls, kind: type, base: type) -> Overrides:
        return cls(*(getattr(kind, each.name) is not getattr(base, each.name) for each in fields(cls)))

    @property
    def averages_batches(self) -> bool:
        """The training loss is made of what ``fit_batch`` returns, as in SpeechBrain, not of exact sums."""
        return self.fit_batch or self.update_average
