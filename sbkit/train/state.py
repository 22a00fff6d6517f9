"""The counters and flags of a run, and how they are saved in a checkpoint.

A batch here is a micro-batch, a step is an optimizer step, and an epoch's counters count from its beginning. Three have
SpeechBrain's names in a Brain and in checkpoints, where ``step`` counts batches (see ``state_dict``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from sbkit.train.loss import Mean


class _EpochCounters(NamedTuple):
    """What an epoch has counted when its training ended."""

    batches: int
    steps: int
    failed_steps: int
    mean_loss: Mean


@dataclass
class TrainState:
    """Counters and flags of a run, owned by the ``Brain`` and shared with its loops."""

    # Of the run.
    optimizer_step: int = 0
    """Updates of weights done in the whole run; a step without an optimizer updates nothing."""
    planned_epochs: int | None = None
    """The number of epochs that the run began with; None if unknown."""
    parameters_vary: bool = False
    """Whether backward reaches different parameters in different steps, so that ranks agree on them in each."""

    # Of the epoch that trains now.
    epoch: int | None = None
    """Its number, from 1; in no checkpoint, as the epoch counter saves it."""
    batches_in_epoch: int = 0
    """Batches trained on in this epoch; in a validation or test, batches evaluated."""
    steps_in_epoch: int = 0
    """Steps taken in this epoch."""
    planned_steps_in_epoch: int | None = None
    """Steps that this epoch has, if its data has a plan."""
    last_batch_in_epoch: int | None = None
    """The number of the epoch's last batch, if known; in no checkpoint."""
    failed_in_epoch: int = 0
    """Steps of this epoch that were skipped because something was not finite."""
    mean_loss: Mean = field(default_factory=Mean)
    """The mean training loss of this epoch, over the steps whose values the host has."""
    epoch_began: float = field(default_factory=time.monotonic)
    """When this epoch's training began by the monotonic clock, as if it had never been stopped."""

    # Of this ``fit``, in no checkpoint.
    validates: bool = False
    """Whether a validation follows each epoch."""
    first_step_checked: bool = False
    """Whether the checks after the first step are done, or after the first one since parameters thawed."""
    largest_tried: bool = False
    """Whether the largest batches of the plan have been tried."""

    # Of this process, in no checkpoint.
    saved_at: float = field(default_factory=time.monotonic)
    """When the last checkpoint was saved, or the epoch began, by the monotonic clock."""
    batches_since_save: int = 0
    """Batches trained on since then."""
    warned_unreached: set[str] = field(default_factory=set)
    """Names of the parameters without a gradient that a warning has named."""
    _end_of_training: _EpochCounters | None = field(default=None, repr=False)

    def count_step(self, updated: bool) -> int:
        """Count a step, and whether it was one with an update; return its number: of the update, or in its epoch."""
        self.steps_in_epoch += 1
        if not updated:
            return self.steps_in_epoch
        self.optimizer_step += 1
        return self.optimizer_step

    def restart_save_interval(self) -> None:
        """Begin to count anew what has come since the last checkpoint."""
        self.saved_at = time.monotonic()
        self.batches_since_save = 0

    def end_training(self) -> None:
        """Set the epoch's counters to 0 for the validation that follows its training."""
        self._end_of_training = _EpochCounters(self.batches_in_epoch, self.steps_in_epoch, self.failed_in_epoch,
                                               self.mean_loss)
        self.batches_in_epoch = 0
        self.steps_in_epoch = 0
        self.failed_in_epoch = 0
        self.mean_loss = Mean()

    def back_to_training(self) -> None:
        """Set the epoch's counters back to the end of its training, to save that and not half a validation."""
        counters = self._end_of_training
        assert counters is not None, "an epoch's training has ended"
        self.batches_in_epoch = counters.batches
        self.steps_in_epoch = counters.steps
        self.failed_in_epoch = counters.failed_steps
        self.mean_loss = counters.mean_loss

    def state_dict(self, mean_loss: float) -> dict[str, Any]:
        """Return what a checkpoint holds: SpeechBrain's three keys, and what an exact resume needs.

        mean_loss : that of the epoch so far
        """
        return {
            # SpeechBrain's names.
            "step": self.batches_in_epoch,
            "avg_train_loss": mean_loss,
            "optimizer_step": self.optimizer_step,
            # And sbkit's own, which must not change: old checkpoints have them.
            "epochs": self.planned_epochs,
            "epoch_step": self.steps_in_epoch,
            "epoch_steps": self.planned_steps_in_epoch,
            "loss_sums": [self.mean_loss.total, self.mean_loss.count],
            "nonfinite_count": self.failed_in_epoch,
            "graph_changes": self.parameters_vary,
            "train_seconds": time.monotonic() - self.epoch_began,
        }

    def load_state_dict(self, saved: Mapping[str, Any], end_of_epoch: bool) -> None:
        """Continue from a saved state; one from the end of an epoch continues at the start of the next."""
        self.optimizer_step = saved.get("optimizer_step", saved["step"])
        self.planned_epochs = saved.get("epochs") or self.planned_epochs
        self.parameters_vary = saved.get("graph_changes", False)

        of_epoch: Mapping[str, Any] = {"step": 0, "avg_train_loss": 0.0} if end_of_epoch else saved
        self.batches_in_epoch = of_epoch["step"]
        self.steps_in_epoch = of_epoch.get("epoch_step", 0)
        self.planned_steps_in_epoch = of_epoch.get("epoch_steps")
        self.failed_in_epoch = of_epoch.get("nonfinite_count", 0)
        self.epoch_began = time.monotonic() - of_epoch.get("train_seconds", 0.0)
        self.mean_loss.set(float(of_epoch["avg_train_loss"]))
        self.mean_loss.total, self.mean_loss.count = of_epoch.get("loss_sums", (0.0, 0.0))


def state_view(field_name: str) -> property:
    """Return an attribute of a Brain, documented by SpeechBrain, that is stored in this field of its ``TrainState``."""
    return property(attrgetter(f"train_state.{field_name}"),
                    lambda brain, value: setattr(brain.train_state, field_name, value))
