"""Detection of busy cores in training on a CPU, from Linux's count of the time that threads wait for a core."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch

from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

_THREADS = Path("/proc/self/task")
_MEASURE_AFTER = 20.0  # seconds of an epoch
_LEAST = 2.0  # seconds, at the end of a shorter epoch
_WORTH_REPORTING = 0.15


class Contention:
    """Measures how long the slowest thread of this process waited for a core, since each step waits for it.

    Does nothing on other devices, with only one thread, or if the system does not count this.
    """

    def __init__(self, device: torch.device):
        self._counts = device.type == "cpu" and torch.get_num_threads() > 1 and bool(_waited())
        self._told = False
        self.reset()

    def reset(self) -> None:
        """Start measuring, at the start of an epoch."""
        self._measured_at = self._told
        self._began = time.monotonic()
        self._before = _waited() if self._counts else {}

    def share(self) -> float | None:
        """Return the share of the time since ``reset`` that the slowest thread waited; None if not measured."""
        passed = time.monotonic() - self._began
        if not self._counts or passed <= 0:
            return None
        waited = (seconds - self._before.get(thread, 0.0) for thread, seconds in _waited().items())
        return min(1.0, max(waited, default=0.0) / passed)

    def step(self) -> None:
        """Warn, after a step, if the epoch has run long enough to tell."""
        self._measure(_MEASURE_AFTER)

    def close(self) -> float | None:
        """Warn, at the end of an epoch, if there was no warning yet, and return its share."""
        self._measure(_LEAST)
        return self.share()

    def _measure(self, after: float) -> None:
        """Warn once in a run, and check at most once in an epoch."""
        if self._measured_at or not self._counts or time.monotonic() - self._began < after:
            return
        self._measured_at, share = True, self.share()
        if share is not None and share > _WORTH_REPORTING:
            self._told = True
            if ranks.is_main():
                threads = torch.get_num_threads()
                logger.warning(
                    "Training waited for a core %.0f %% of the time, and its %d threads all wait for the slowest. "
                    "Other processes, data workers or ranks use the cores: set OMP_NUM_THREADS=%d, or to the number "
                    "of free cores", 100 * share, threads, max(1, threads // 2))


def _waited() -> dict[str, float]:
    """Return the seconds that each thread has waited for a core."""
    found: dict[str, float] = {}
    try:
        threads = os.listdir(_THREADS)
    except OSError:
        return found
    for thread in threads:
        try:
            ran, waited = map(int, (_THREADS / thread / "schedstat").read_text().split()[:2])
        except (OSError, ValueError):  # the thread has just ended
            continue
        if ran:  # otherwise this kernel does not count
            found[thread] = waited / 1e9
    return found
