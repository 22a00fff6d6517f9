"""Whether other work keeps a training on a CPU from its cores: Linux counts how long a thread that could run waits."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_THREADS = Path("/proc/self/task")
_LOOK_AFTER = 20.0  # seconds of an epoch
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
        return min(1.0, max(seconds - self._before.get(thread, 0.0) for thread, seconds in _waited().items()) / passed)

    def step(self) -> None:
        """After a step: tells once in a run, and soon, what is slow."""
        if self._looked or not self._counts or time.monotonic() - self._began < _LOOK_AFTER:
            return
        self._looked, share = True, self.share()
        if share > _WORTH_TELLING:
            self._told = True
            logger.warning(
                "Other work on this machine kept training from a core for %.0f %% of the time, and its %d threads all "
                "wait for the slowest. Say how many cores are free: OMP_NUM_THREADS=%d, for example",
                100 * share, torch.get_num_threads(), max(1, torch.get_num_threads() // 2))


def _waited() -> dict[str, float]:
    """Seconds that each thread could have run and had no core."""
    found = {}
    try:
        threads = os.listdir(_THREADS)
    except OSError:
        return found
    for thread in threads:
        try:
            found[thread] = int((_THREADS / thread / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # it has just ended; or this kernel doesn't count
            continue
    return found
