"""Random number generators: capturing, restoring and seeding them, and saving them in checkpoints."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks

from sbkit.train.checkpoint.files import write_state
from sbkit.train.checkpoint.state import load_file
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)


def capture(device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return the state of the generators of Python, numpy, torch and the device as CPU tensors, without a host sync."""
    version, words, gauss = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    state = {
        "python": torch.from_numpy(np.array((version, *words), dtype=np.int64)),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(of_numpy["state"]["key"].astype(np.int64)),
        "numpy_rest": torch.tensor(
            [of_numpy["state"]["pos"], of_numpy["has_gauss"], of_numpy["gauss"]], dtype=torch.float64
        ),
        "torch": torch.get_rng_state(),
    }
    device = torch.device(device)
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: dict[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
    """Set all generators to a captured state; the device's only if it was captured."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    pos, has_gauss, value = state["numpy_rest"].tolist()
    np.random.set_state({
        "bit_generator": "MT19937",
        "state": {"key": state["numpy"].numpy().astype(np.uint32), "pos": int(pos)},
        "has_gauss": int(has_gauss), "gauss": value,
    })
    torch.set_rng_state(state["torch"])
    device = torch.device(device)
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def seed_all(*parts: int) -> None:
    """Seed all generators from numbers such as a seed, a rank and a step; different numbers give different streams."""
    words = _words(*parts)
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2] << 32 | words[3])  # includes GPUs


def _words(*parts: int) -> list[int]:
    entropy = [len(parts), *(part & 0xFFFFFFFF for part in parts)]  # without the length, trailing zeros would not count
    return np.random.SeedSequence(entropy).generate_state(4).tolist()


@contextmanager
def seeded(*parts: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed all generators inside this context, and restore them on exit."""
    before = capture(device)
    seed_all(*parts)
    try:
        yield
    finally:
        restore(before, device)


def seed_rank(rank: int, step: int, device: torch.device | str) -> None:
    """Give this rank its own random numbers on ``device`` and in numpy, derived from torch's seed.

    Ranks start with the same seed, so that they have the same initial weights. Without this call, row 3 of each
    rank's batch would get the same dropout and the same masks. Python's generator, and torch's on the host of a GPU,
    stay the same on all ranks, so that a layer is dropped, or a chunk size chosen, on all of them or on none.
    """
    device = torch.device(device)
    words = _words(torch.initial_seed(), rank, step)
    np.random.seed(words[1])
    seed = words[2] << 32 | words[3]
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed_all(seed)


class DrawnAhead:
    """Random numbers that objects drew earlier and still hold, of which generators know nothing: none, by default."""

    def restart(self) -> None:
        """Have objects whose place can't be saved draw anew; called before saving, and before loading."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return what the others hold, to save."""
        return {}

    def take_from(self, state: dict[str, torch.Tensor]) -> None:
        """Take what ``state`` returned out of a rank's saved state, and give it back to the objects."""


@partial(register_checkpoint_hooks, save_on_main_only=False)
class RngState:
    """A recoverable that makes random numbers after a resume the same as without the interruption.

    The states of all ranks are saved in one file. With another number of ranks they can't be continued: all ranks are
    then seeded from seed, rank and step, which is logged.

    Code between loading and the first step (starting workers, hooks of a stage) also draws random numbers. After
    loading a checkpoint from the middle of an epoch, call ``restore`` right before the first step, since an
    uninterrupted run did all that before the checkpoint.

        rng = RngState(seed=1234, step=lambda: brain.optimizer_step, device=brain.device)
        checkpointer.add_recoverable("rng", rng, optional_load=True)

    step : returns the number of optimizer steps done
    device : of the run; for CUDA, the generators of all devices in use are saved
    drawn_ahead : random numbers outside of generators; a Brain saves those of SpeechBrain's objects
    """

    def __init__(self, seed: int = 0, step: Callable[[], int] | None = None, device: torch.device | str = "cpu",
                 drawn_ahead: DrawnAhead | None = None):
        self.seed = seed
        self.device = device
        self.drawn_ahead = drawn_ahead or DrawnAhead()
        self.step = step or (lambda: 0)
        self._restore_loaded: Callable[[], None] | None = None

    def seed_rank(self) -> None:
        """Give each rank its own random numbers (by the function of this name); do nothing if there is only one."""
        if ranks.world_size() > 1:
            seed_rank(ranks.rank(), int(self.step()), self.device)

    def restore(self) -> bool:
        """Set the generators once more to a state loaded from the middle of an epoch; return whether there was one."""
        if self._restore_loaded is None:
            return False
        self._restore_loaded()
        self._restore_loaded = None
        return True

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        self.drawn_ahead.restart()
        state = capture(self.device) | self.drawn_ahead.state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state |= {f"cuda:{index}": of_device for index, of_device in enumerate(torch.cuda.get_rng_state_all())}
        saved = ranks.gather_objects(state)
        if ranks.is_main():
            kind = torch.device(self.device).type
            write_state({"ranks": saved, "step": int(self.step()), "device": kind}, path)

    @mark_as_loader
    def _load(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        self.drawn_ahead.restart()
        saved = load_file(path)
        world_size = ranks.world_size()
        if len(saved["ranks"]) == world_size:
            state = saved["ranks"][ranks.rank()]
            self.drawn_ahead.take_from(state)
            if saved["device"] != torch.device(self.device).type:
                state.pop("device", None)  # another kind of generator
            restore_loaded = partial(self._restore_generators, state)
        else:
            if ranks.is_main():
                logger.info("The checkpoint was written by %d processes and now there are %d, so random numbers are "
                            "reseeded from seed %d, the rank and step %d",
                            len(saved["ranks"]), world_size, self.seed, saved["step"])
            restore_loaded = partial(self._reseed, saved["step"])
        restore_loaded()
        self._restore_loaded = None if end_of_epoch else restore_loaded

    def _restore_generators(self, state: dict[str, torch.Tensor]) -> None:
        # Those of all GPUs by number, and then that of the run's own device, which may have another number now.
        for index in range(torch.cuda.device_count()):
            if f"cuda:{index}" in state:
                torch.cuda.set_rng_state(state[f"cuda:{index}"], index)
        restore(state, self.device)

    def _reseed(self, step: int) -> None:
        seed_all(self.seed, step)
        seed_rank(ranks.rank(), step, self.device)
