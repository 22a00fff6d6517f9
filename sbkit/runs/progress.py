"""The progress of a run's earlier starts: read from its checkpoints, or lost without one."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from pathlib import Path
from typing import NamedTuple

import yaml
from speechbrain.utils.checkpoints import DEFAULT_LOAD_HOOKS
from speechbrain.utils.epoch_loop import EpochCounter, EpochCounterWithStopper

from sbkit.compat.brain import Brain
from sbkit.score.run_files import METRICS
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint.state import NotLoaded, hook_for, load_recoverable
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
    done : optimizer steps
    finished : epochs
    within : steps in the current epoch
    larger : what has to be larger for a run that has ended to train on, and empty if epochs are left
    """

    epochs: int
    done: int = 0
    finished: int = 0
    within: int = 0
    larger: str = ""

    def steps(self, epoch_steps: int, epochs: int) -> int:
        """The steps of the whole run of ``epochs``, if an epoch has ``epoch_steps`` from now on.

        Steps that are done count as they were: with another corpus or batching, those epochs had other lengths.
        """
        left = epochs - self.finished
        return self.done + (left * epoch_steps - min(self.within, epoch_steps) if left > 0 else 0)


def read_progress(checkpointer: Checkpointer, counter: EpochCounter) -> RunProgress:
    """Read the progress of a run before its checkpoint is loaded.

    If the newest checkpoint turns out to be damaged, an older one is loaded. The total stays the same then: fewer steps
    are done, and more are left.
    """
    name = next((name for name, each in checkpointer.recoverables.items() if each is counter), "")
    for checkpoint in checkpointer.find_checkpoints():
        with contextlib.suppress(AttributeError, KeyError, OSError, TypeError, ValueError, yaml.YAMLError, NotLoaded):
            ended = checkpoint.meta.get("end-of-epoch", True)
            state, at = TrainState(), copy.copy(counter)
            state.load_state_dict(yaml.safe_load(checkpoint.paramfiles["brain"].read_text(encoding="utf-8")), ended)
            load_recoverable(at, name, checkpoint.paramfiles[name], hook_for(at, None, DEFAULT_LOAD_HOOKS, "load"),
                             ended)
            if isinstance(at, EpochCounterWithStopper) and STOPPER in checkpoint.paramfiles:
                load_stopper(at, checkpoint.paramfiles[STOPPER], ended)
            return RunProgress(state.epochs or counter.limit, state.optimizer_step, at.current, state.epoch_step,
                               keys_to_raise(at))
    return RunProgress(counter.limit)


def last_logged_step(folder: Path) -> int:
    """Return the last step that earlier starts of a run wrote to its metrics, or 0."""
    path = folder / METRICS
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return max(map(int, _STEP.findall(text)), default=0)


def warn_of_lost_steps(brain: Brain, last: int, epoch_steps: int) -> None:
    """Warn if an earlier start trained but saved no checkpoint, and say when the first one is saved."""
    if last and ranks.is_main():
        minutes, batches = brain.ckpt_interval_minutes, brain.ckpt_interval_steps
        within = f"after {minutes:g} minutes (ckpt_interval_minutes), or " if minutes > 0 else (
            f"after {batches} batches (ckpt_interval_steps), or " if batches > 0 else "")
        logger.warning("An earlier start of this run reached step %d or later but saved no checkpoint: that work is "
                       "lost, and the run starts from the beginning. The first checkpoint is saved %sat the end of "
                       "epoch 1, after %d steps",
                       last, within, epoch_steps)
