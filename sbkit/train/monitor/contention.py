"""Whether a training on a CPU has its cores to itself: Linux counts how long a thread that could run waits for one."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch

from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

_THREADS = Path("/proc/self/task")
_LOOK_AFTER = 20.0  # seconds of an epoch
_LEAST = 2.0  # of a shorter one
_WORTH_TELLING = 0.15


class Contention:
    """How long the thread of this process that waited longest waited for a core: each step waits for the slowest.

    Nothing is counted where another device computes, or one thread alone, or where the system doesn't tell.
    """

    def __init__(self, device: torch.device):
        self._counts = device.type == "cpu" and torch.get_num_threads() > 1 and bool(_waited())
        self._told = False
        self.reset()

    def reset(self) -> None:
        """Start a new epoch."""
        self._looked = self._told
        self._began = time.monotonic()
        self._before = _waited() if self._counts else {}

    def share(self) -> float | None:
        """Of the time since :meth:`reset`."""
        passed = time.monotonic() - self._began
        if not self._counts or passed <= 0:
            return None
        waited = (seconds - self._before.get(thread, 0.0) for thread, seconds in _waited().items())
        return min(1.0, max(waited, default=0.0) / passed)

    def step(self) -> None:
        """After a step: tells soon what is slow."""
        self._look(_LOOK_AFTER)

    def close(self) -> float | None:
        """The epoch is over: tells if there was no time before. Gives its share."""
        self._look(_LEAST)
        return self.share()

    def _look(self, after: float) -> None:
        """Once in an epoch, until it was told."""
        if self._looked or not self._counts or time.monotonic() - self._began < after:
            return
        self._looked, share = True, self.share()
        if share is not None and share > _WORTH_TELLING:
            self._told = True
            if ranks.is_main():
                threads = torch.get_num_threads()
                logger.warning(
                    "Training waited for a core %.0f %% of the time, and its %d threads all wait for the slowest. "
                    "Other work here, num_workers or other ranks take the cores: give OMP_NUM_THREADS=%d, or as many "
                    "as are free", 100 * share, threads, max(1, threads // 2))


def _waited() -> dict[str, float]:
    """Seconds that each thread could have run and had no core."""
    found: dict[str, float] = {}
    try:
        threads = os.listdir(_THREADS)
    except OSError:
        return found
    for thread in threads:
        try:
            ran, waited = map(int, (_THREADS / thread / "schedstat").read_text().split()[:2])
        except (OSError, ValueError):  # it has just ended
            continue
        if ran:  # else this kernel doesn't count
            found[thread] = waited / 1e9
    return found
