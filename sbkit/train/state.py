"""The counters and flags of a run, and how they are saved in a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from sbkit.train.step import Mean


@dataclass
class TrainState:
    """Counters and flags of a run, owned by the ``Brain`` and shared with its loops."""

    step: int = 0
    """Micro-batches done in this epoch, or batches in this evaluation."""
    optimizer_step: int = 0
    """Updates done in the whole run."""
    nonfinite_count: int = 0
    """Steps of this epoch that were skipped because something was not finite."""
    epoch: int | None = None
    epochs: int | None = None
    """The number of epochs that the run began with; None if unknown."""
    epoch_step: int = 0
    """Updates done in this epoch."""
    epoch_steps: int | None = None
    """Updates planned for this epoch."""
    began: float = field(default_factory=time.monotonic)
    """When this epoch's training began by the monotonic clock, as if it had never been stopped."""
    last_batch: int | None = None
    """The number of the epoch's last micro-batch, if known."""
    mean_loss: Mean = field(default_factory=Mean)
    """The mean training loss of this epoch, over the steps whose values the host has."""
    validates: bool = False
    """Whether a validation follows each epoch."""
    first_step_checked: bool = False
    """Whether the checks after the first step of a ``fit`` are done."""
    graph_changes: bool = False
    """Whether backward reaches different parameters in different steps, so that ranks agree on them in each."""

    # Of this process, in no checkpoint.
    saved_at: float = field(default_factory=time.monotonic)
    """When the last checkpoint was saved, or the epoch began, by the monotonic clock."""
    batches_since_save: int = 0
    """Micro-batches since then."""
    largest_tried: bool = False
    """Whether the largest micro-batch of this ``fit`` has been tried."""
    unreached: set[str] = field(default_factory=set)
    """Names of the parameters without a gradient that a warning has named."""
    _trained: tuple[int, int, Mean, int] | None = field(default=None, repr=False)

    def count_step(self, updates: int) -> int:
        """Count a step of ``updates`` (0 or 1) updates; return its number: of the update, or in its epoch."""
        self.optimizer_step += updates
        self.epoch_step += 1
        return self.optimizer_step if updates else self.epoch_step

    def restart_save_interval(self) -> None:
        """Begin to count anew what has come since the last checkpoint."""
        self.saved_at, self.batches_since_save = time.monotonic(), 0

    def end_training(self) -> None:
        """Set the counters to 0 for the validation that follows an epoch's training."""
        self._trained = (self.step, self.epoch_step, self.mean_loss, self.nonfinite_count)
        self.mean_loss = Mean()
        self.step = self.epoch_step = self.nonfinite_count = 0

    def back_to_training(self) -> None:
        """Set the counters back to the end of the epoch's training."""
        if self._trained is None:
            raise RuntimeError("no epoch's training has ended")
        self.step, self.epoch_step, self.mean_loss, self.nonfinite_count = self._trained

    def state_dict(self, mean_loss: float) -> dict[str, Any]:
        """Return SpeechBrain's three keys and what an exact resume needs; ``mean_loss`` is that of the epoch so far."""
        return {
            "step": self.step, "avg_train_loss": mean_loss, "optimizer_step": self.optimizer_step,
            "epochs": self.epochs, "epoch_step": self.epoch_step, "epoch_steps": self.epoch_steps,
            "loss_sums": [self.mean_loss.total, self.mean_loss.count],
            "nonfinite_count": self.nonfinite_count, "graph_changes": self.graph_changes,
            "train_seconds": time.monotonic() - self.began,
        }

    def load_state_dict(self, saved: Mapping[str, Any], end_of_epoch: bool) -> None:
        """Continue from a saved state; one from the end of an epoch continues at the start of the next."""
        self.optimizer_step = saved.get("optimizer_step", saved["step"])
        self.epochs = saved.get("epochs") or self.epochs
        self.graph_changes = saved.get("graph_changes", False)
        here: Mapping[str, Any] = {"step": 0, "avg_train_loss": 0.0} if end_of_epoch else saved
        self.step, self.epoch_step = here["step"], here.get("epoch_step", 0)
        self.epoch_steps = here.get("epoch_steps")
        self.nonfinite_count = here.get("nonfinite_count", 0)
        self.began = time.monotonic() - here.get("train_seconds", 0.0)
        self.mean_loss.set(float(here["avg_train_loss"]))
        self.mean_loss.total, self.mean_loss.count = here.get("loss_sums", (0.0, 0.0))


def state_view(name: str) -> property:
    """Return an attribute of a Brain, documented by SpeechBrain, that is stored in its ``TrainState``."""
    return property(attrgetter(f"train_state.{name}"), lambda brain, value: setattr(brain.train_state, name, value))
