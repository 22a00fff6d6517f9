"""What tests of all tasks that make sound share: which clips one may listen to, and the time that making them took."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

#: Clips that a report lets one hear.
KEPT = 10
Row = Any  # of a test: a task's own NamedTuple, with id, reference, and sound ([S] int16, of clips that are kept)


class Drawn:
    """The clips of a test that are kept, the first by lot so far."""

    def __init__(self) -> None:
        self._kept: list[str] = []

    def take(self, name: str, sound: np.ndarray) -> np.ndarray | None:
        """Return a clip in 16 bits if it is among those that are kept."""
        self._kept = sorted([*self._kept, lot(name)])[:KEPT]
        return pcm(sound) if lot(name) in self._kept else None


def first_drawn(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of all ranks, of which only the ``KEPT`` first drawn still have their sound."""
    last = max(sorted(lot(row.id) for row in rows)[:KEPT], default="")
    return [row if lot(row.id) <= last else row._replace(sound=None) for row in rows]


def lot(name: str) -> str:
    """Draw an utterance's place among all, the same in each run and on any number of ranks."""
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def pcm(sound: np.ndarray) -> np.ndarray:
    """Round a waveform to 16 bits."""
    return (sound.clip(-1, 1) * 32767).round().astype(np.int16)


class Clock:
    """Measures how long the last batch took."""

    seconds = 0.0

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Measure a batch inside this context, until the device has done it."""
        _wait(device)
        began = time.perf_counter()
        yield
        _wait(device)
        self.seconds = time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
