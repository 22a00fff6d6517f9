"""The length of a run in optimizer steps: those that its newest checkpoint has done, and those that are left."""

from __future__ import annotations

import contextlib
import copy
from typing import NamedTuple

import yaml
from speechbrain.utils.checkpoints import DEFAULT_LOAD_HOOKS, Checkpoint
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint.state import NotLoaded, hook_for, load_recoverable
from sbkit.train.state import TrainState


class Begun(NamedTuple):
    """What a run has done; one that only begins has done nothing.

    epochs : ``number_of_epochs`` when it began. ``least_steps`` are spread over these for good, so an epoch keeps its
        length when there are to be more of them
    done : optimizer steps
    finished : epochs
    within : steps of the epoch after these
    """

    epochs: int
    done: int = 0
    finished: int = 0
    within: int = 0

    def steps(self, epoch_steps: int, epochs: int) -> int:
        """The steps of the whole run if an epoch has so many from now on and ``epochs`` are wanted in all.

        What is done counts as it was: with another corpus or batching, those epochs had other lengths.
        """
        left = epochs - self.finished
        return self.done + (left * epoch_steps - min(self.within, epoch_steps) if left > 0 else 0)


def begun(checkpointer: Checkpointer, counter: EpochCounter) -> Begun:
    """Read what a run has done, before anything of it is loaded.

    If the newest checkpoint turns out to be damaged, an older one is loaded. The length is the same then: what is done
    less is left more.
    """
    name = next((name for name, each in checkpointer.recoverables.items() if each is counter), "")
    for checkpoint in checkpointer.find_checkpoints():
        with contextlib.suppress(AttributeError, KeyError, OSError, TypeError, ValueError, yaml.YAMLError, NotLoaded):
            return _read(checkpoint, name, counter)  # all these: it is damaged
    return Begun(counter.limit)


def _read(checkpoint: Checkpoint, name: str, counter: EpochCounter) -> Begun:
    ended = checkpoint.meta.get("end-of-epoch", True)
    state, at = TrainState(), copy.copy(counter)
    state.load_state_dict(yaml.safe_load(checkpoint.paramfiles["brain"].read_text(encoding="utf-8")), ended)
    load_recoverable(at, name, checkpoint.paramfiles[name], hook_for(at, None, DEFAULT_LOAD_HOOKS, "load"), ended)
    return Begun(state.epochs or counter.limit, state.optimizer_step, at.current, state.epoch_step)
