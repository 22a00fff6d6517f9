"""The random numbers of a run: saved for every rank with each checkpoint, and set again when it resumes."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks

from sbkit.train import ranks
from sbkit.train.checkpoint_files import write_state
from sbkit.train.checkpoint_state import load_file

logger = logging.getLogger(__name__)


def get_state() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's generators, of the CPU and of every GPU in use.

    As plain numbers and tensors, which load without running code.
    """
    version, python, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": (version, torch.tensor(python, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": [],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_state(state: dict[str, Any]) -> None:
    """Put back what ``get_state`` gave."""
    version, python, gauss = state["python"]
    random.setstate((version, tuple(python.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)


def seed_all(*parts: int) -> None:
    """Seed every generator from numbers such as a seed, a rank and a step: other numbers, other streams."""
    words = np.random.SeedSequence([part & 0xFFFFFFFF for part in parts]).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]) << 32 | int(words[3]))  # the GPUs' too


@partial(register_checkpoint_hooks, save_on_main_only=False)
class RngState:
    """A recoverable that makes dropout after a resume what it would have been without the stop.

    Saved for every rank in one file. On another number of ranks there is no state to continue: each rank
    is then seeded anew from (seed, rank, step), which is said in the log.

    What runs between loading and the first step (starting workers, a stage's hooks) draws random numbers
    too. For a checkpoint from the middle of an epoch, call ``restore`` right before the first step: the
    run that was never stopped had done all that before the checkpoint.

        rng = RngState(seed=1234, step=lambda: brain.optimizer_step)
        checkpointer.add_recoverable("rng", rng, optional_load=True)

    Arguments
    ---------
    seed : int
        The run's seed.
    step : callable
        Gives the number of optimizer steps done.
    """

    def __init__(self, seed: int = 0, step: Callable[[], int] | None = None):
        self.seed = seed
        self.step = step or (lambda: 0)
        self._again: Callable[[], None] | None = None

    def restore(self) -> bool:
        """Set the generators once more to a loaded mid-epoch state; says whether there was one."""
        again, self._again = self._again, None
        if again is not None:
            again()
        return again is not None

    @mark_as_saver
    def _save(self, path: str | os.PathLike) -> None:
        saved = ranks.gather_objects(get_state())
        if ranks.is_main():
            write_state({"ranks": saved, "step": int(self.step())}, path)

    @mark_as_loader
    def _load(self, path: str | os.PathLike, end_of_epoch: bool) -> None:
        saved = load_file(path)
        rank, world = ranks.rank(), ranks.world_size()
        if len(saved["ranks"]) == world:
            apply = partial(set_state, saved["ranks"][rank])
        else:
            if ranks.is_main():
                logger.info("The checkpoint is of %d processes, now there are %d: random numbers are seeded "
                            "anew from seed %d, the rank and step %d",
                            len(saved["ranks"]), world, self.seed, saved["step"])
            apply = partial(seed_all, self.seed, rank, saved["step"])
        apply()
        self._again = None if end_of_epoch else apply
