"""What the training loop asks of whoever uses it: a loss function, hooks around steps, and a few settings.

``sbkit.compat.hooks`` gives SpeechBrain's Brain this shape. The loop knows nothing else of what it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from sbkit.recipe.speed import Utilisation
from sbkit.train.batches import DataSource, MicroBatch, Objectives, Outputs
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.loss import Computed
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.monitor.timing import StepTimes
from sbkit.train.results import StepResult


@dataclass(frozen=True)
class LoopSettings:
    """Numbers of a run. A script's hooks may change them between two steps, so they are asked for anew."""

    grad_accumulation_factor: int
    """Micro-batches of a step, if the data doesn't say where a step ends."""
    max_grad_norm: float | None
    """The norm to which gradients are clipped; None or 0: they aren't."""
    nonfinite_patience: int
    """Steps of an epoch that may be skipped because something was not finite."""
    step_limit: int | None
    """Updates after which the run ends."""
    batch_limit: int | None
    """Micro-batches of an epoch (``--debug``)."""
    save_minutes: float
    """Minutes between two checkpoints in the middle of an epoch; 0: none by time."""
    save_batches: int
    """Micro-batches between two checkpoints in the middle of an epoch; 0: none by their number."""
    log_interval: float
    """Seconds between lines of metrics.jsonl."""
    graphs: bool | None
    """The key ``graphs``: whether steps are captured as CUDA graphs; None: if the model says that they can be."""
    bar_colour: str | None
    """The colour of the progress bar."""


class EpochBatches(NamedTuple):
    """The rest of an epoch."""

    start: Callable[[], Iterator[MicroBatch]]  # starts the workers that read it, and yields it on the device
    done: int  # for the progress bar, in steps of a plan, otherwise in micro-batches
    total: int | None  # None: unknown
    last_batch: int | None  # the number of the epoch's last micro-batch, if known


class Hooks(Protocol):
    """Hooks and objects of a run. All ranks call the same hooks at the same steps.

    In an epoch they are called in this order:

        open_epoch, batches, begin_profile
            before_batch, compute, after_batch          for each micro-batch; of the last one, after_batch comes
            optimizers                                  after the update
            end_step, open_step                         after each step; open_step also before a fit's first one
            close_step                                  once the host knows a step's result: on a GPU, a step later
            profile_step
        hold_checkpoint, close_epoch
    """

    # ------------------------------------------------------------ what the run has, asked for whenever it is needed

    modules: torch.nn.Module
    recipe: Mapping[str, Any]
    """The recipe's values, after which parameters are named in messages."""

    @property
    def settings(self) -> LoopSettings:
        """The numbers of the run, as they are now."""

    @property
    def checkpointer(self) -> Checkpointer | None:
        """What saves checkpoints; None: nothing is saved."""

    @property
    def metrics_log(self) -> MetricsLog | None:
        """The log metrics.jsonl; None: there is none."""

    @property
    def utilisation(self) -> Utilisation | None:
        """The FLOPs of a second of audio, if they are to be reported."""

    @property
    def compiled(self) -> bool:
        """Whether torch compiles layers, so that an epoch reports how many graphs were compiled in it."""

    @property
    def locks_folder(self) -> bool:
        """Whether the loop has to lock the checkpoints' folder, since nobody else does."""

    @property
    def updates_weights(self) -> bool:
        """Whether there are optimizers, or will be, of which some may be frozen."""

    @property
    def reads_outputs(self) -> bool:
        """Whether ``after_batch`` reads outputs and objectives."""

    # ------------------------------------------------------------ at the ends of an epoch

    def open_epoch(self, epoch: int) -> None:
        """Begin the training of an epoch, before its batches are asked for."""

    def batches(self, train_set: DataSource, epoch: int) -> EpochBatches:
        """Return the rest of an epoch from the run's state on."""

    def begin_profile(self) -> None:
        """Begin to profile an epoch, if the run is to be profiled."""

    def hold_checkpoint(self) -> None:
        """Keep the state at the end of an epoch's training, for a signal or an error before the epoch ends."""

    def close_epoch(self, epoch: int, loss: float) -> None:
        """End the training of an epoch, with its mean loss, before its validation."""

    # ------------------------------------------------------------ within a step

    def before_batch(self, batch: MicroBatch, last: bool) -> None:
        """Prepare for a micro-batch; ``last``: whether its step ends with it."""

    def compute(self, batch: MicroBatch, times: StepTimes) -> Computed:
        """Run forward and loss of a training micro-batch, marking "forward" between the two."""

    def after_batch(self, batch: MicroBatch, outputs: Outputs, objectives: Objectives, last: bool) -> None:
        """Process what was computed of a micro-batch; of the last one of a step, after the update."""

    def optimizers(self) -> list[Optimizer]:
        """Return those that update in this step."""

    def all_optimizers(self) -> list[Optimizer]:
        """Return all, frozen ones too."""

    def zero_gradients(self) -> None:
        """Drop all gradients, at both ends of an epoch."""

    # ------------------------------------------------------------ between two steps

    def end_step(self, number: int) -> None:
        """The update of this number is queued; its result is not known yet."""

    def open_step(self, number: int) -> None:
        """Prepare the update of this number, counted from 1."""

    def close_step(self, result: StepResult) -> None:
        """The result of a step is known."""

    def profile_step(self) -> bool:
        """Count a step; return whether the profile is complete, which ends the run."""

    def write_checkpoint(self) -> None:
        """Save a checkpoint in the middle of an epoch."""

    def explain(self, result: StepResult, epoch: int | None) -> str:
        """Find out why a step was not finite; all ranks call it, and get the same text."""

    # ------------------------------------------------------------ before a trial, or a capture as CUDA graphs

    def restoring(self) -> AbstractContextManager[None]:
        """Undo on exit all changes by computing losses and gradients."""

    def capture_refusal(self) -> str | None:
        """Return why steps are not to be captured as CUDA graphs; None if they are."""

    def graph_key(self) -> Hashable:
        """Return what decides, besides the shapes of a batch, which kernels the next step has."""

    def state_owners(self) -> Iterable[tuple[str, object]]:
        """Yield whatever a step might leave a value in, with its name."""
