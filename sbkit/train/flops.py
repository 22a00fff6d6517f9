"""Model FLOPs utilisation: the arithmetic of a run's training against what its device can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from sbkit.recipe.speed import peak_of


class Utilisation:
    """Counts the operations of one batch, forward and backward, and takes them for those of all by their seconds.

        with utilisation.counted(batch): ...     # the first batch is counted, others pass
        utilisation.share(padded_seconds, took)  # None where it isn't known

    Compiled code can't be counted (``enabled``). Padding is counted with the rest: the device computes it, and how
    much of it there is stands beside it.
    """

    def __init__(self, device: torch.device, precision: str, enabled: bool = True):
        self.device, self.precision, self.enabled = device, precision, enabled
        self.per_second: float | None = None
        """Operations for a second of audio, padding included."""
        self._peak: tuple[float, str] | None = None

    @contextmanager
    def counted(self, batch: Any) -> Iterator[None]:
        """Within, forward and backward of ``batch`` run."""
        seconds = getattr(batch, "padded_seconds", 0.0)
        if not self.enabled or self.per_second is not None or not seconds or not getattr(batch, "weight", 1.0):
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self.per_second = counter.get_total_flops() / seconds
        self._peak = peak_of(self.device, self.precision)

    def share(self, padded_seconds: float, took: float) -> float | None:
        """Of what the device can do, this much was done while ``padded_seconds`` of audio went through."""
        if not self.per_second or self._peak is None or took <= 0 or not padded_seconds:
            return None
        return self.per_second * padded_seconds / took / self._peak[0]

    def line(self, padded_seconds: float, took: float) -> str:
        """For people; empty where nothing is known."""
        share = self.share(padded_seconds, took)
        return "" if share is None else f"{100 * share:.0f} % of {self._peak[1]} in use"
