"""The progress of a run's earlier starts: read from its checkpoints, or lost without one."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from pathlib import Path
from typing import NamedTuple

import yaml
from speechbrain.utils.checkpoints import Checkpoint
from speechbrain.utils.epoch_loop import EpochCounter, EpochCounterWithStopper

from sbkit.compat.brain import Brain
from sbkit.score.run_files import METRICS
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint.hooks import loading_hook
from sbkit.train.checkpoint.state import NotLoaded, load_recoverable
from sbkit.train.distributed import ranks
from sbkit.train.early_stopping import STOPPER, keys_to_raise, load_stopper
from sbkit.train.state import TrainState

logger = logging.getLogger(__name__)

#: The step in a line of the metrics that a run writes while it trains; earlier versions wrote lines of kind loss, too.
_STEP = re.compile(r'"kind": "(?:step|loss|epoch)".*?"step": (\d+)')


class RunProgress(NamedTuple):
    """The progress of a run; all zero for a new one.

    epochs : ``number_of_epochs`` when it started. ``min_steps`` stay spread over these, so that an epoch keeps its
        length if the number grows
    steps_done : optimizer steps
    finished_epochs : epochs
    steps_in_epoch : of ``steps_done``, those in the current epoch
    keys_to_raise : what has to be larger for a run that has ended to train on, and empty if epochs are left
    """

    epochs: int
    steps_done: int = 0
    finished_epochs: int = 0
    steps_in_epoch: int = 0
    keys_to_raise: str = ""

    def steps(self, epoch_steps: int, epochs: int) -> int:
        """The steps of the whole run of ``epochs``, if an epoch has ``epoch_steps`` from now on.

        Steps that are done count as they were: with another corpus or batching, those epochs had other lengths.
        """
        epochs_left = epochs - self.finished_epochs
        if epochs_left <= 0:
            return self.steps_done
        return self.steps_done + epochs_left * epoch_steps - min(self.steps_in_epoch, epoch_steps)


def read_progress(checkpointer: Checkpointer, counter: EpochCounter) -> RunProgress:
    """Read the progress of a run before its checkpoint is loaded.

    If the newest checkpoint turns out to be damaged, an older one is loaded. The total stays the same then: fewer steps
    are done, and more are left.
    """
    counter_name = next((name for name, recoverable in checkpointer.recoverables.items() if recoverable is counter), "")
    for checkpoint in checkpointer.find_checkpoints():
        # Whatever a damaged file raises: the next older checkpoint is read instead.
        with contextlib.suppress(AttributeError, KeyError, OSError, TypeError, ValueError, yaml.YAMLError, NotLoaded):
            return _progress_at(checkpoint, counter, counter_name)
    return RunProgress(counter.limit)


def _progress_at(checkpoint: Checkpoint, counter: EpochCounter, counter_name: str) -> RunProgress:
    """Read a checkpoint's progress into copies, so that the run's own counter stays as it is."""
    epoch_ended = checkpoint.meta.get("end-of-epoch", True)
    state = TrainState()
    state.load_state_dict(yaml.safe_load(checkpoint.paramfiles["brain"].read_text(encoding="utf-8")), epoch_ended)

    saved_counter = copy.copy(counter)
    load_hook = loading_hook(saved_counter)
    load_recoverable(saved_counter, counter_name, checkpoint.paramfiles[counter_name], load_hook, epoch_ended)
    if isinstance(saved_counter, EpochCounterWithStopper) and STOPPER in checkpoint.paramfiles:
        load_stopper(saved_counter, checkpoint.paramfiles[STOPPER], epoch_ended)
    return RunProgress(state.planned_epochs or counter.limit, state.optimizer_step, saved_counter.current,
                       state.steps_in_epoch, keys_to_raise(saved_counter))


def last_logged_step(folder: Path) -> int:
    """Return the last step that earlier starts of a run wrote to its metrics, or 0."""
    path = folder / METRICS
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return max(map(int, _STEP.findall(text)), default=0)


def warn_of_lost_steps(brain: Brain, last: int, epoch_steps: int) -> None:
    """Warn if an earlier start trained but saved no checkpoint, and say when the first one is saved."""
    if not last or not ranks.is_main():
        return
    within_epoch = ""
    if brain.ckpt_interval_minutes > 0:
        within_epoch = f"after {brain.ckpt_interval_minutes:g} minutes (ckpt_interval_minutes), or "
    elif brain.ckpt_interval_steps > 0:
        within_epoch = f"after {brain.ckpt_interval_steps} batches (ckpt_interval_steps), or "
    logger.warning("An earlier start of this run reached step %d or later but saved no checkpoint: that work is "
                   "lost, and the run starts from the beginning. The first checkpoint is saved %sat the end of "
                   "epoch 1, after %d steps",
                   last, within_epoch, epoch_steps)
