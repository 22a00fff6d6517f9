"""What tests of all tasks that make sound share: which clips one may listen to, and the time that making them took."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from speechbrain.core import Stage

from sbkit.tasks.task import Task

logger = logging.getLogger(__name__)

#: Clips that a report lets one hear: so many drawn by lot, and so many of the worst.
KEPT = 10
#: What to install for each measure.
_FROM = {"pystoi": "'sbkit[speech]'", "pesq": "pesq"}
Row = Any  # of a test: a task's own NamedTuple, with id, reference, and sound (int16, of clips that are kept)


def stoi(wanted: np.ndarray, made: np.ndarray, sample_rate: int) -> float | None:
    """Compute the short-time objective intelligibility, at most 1; None for a clip that has too little speech, and
    where pystoi is not installed."""
    measure = measure_of("pystoi", "stoi")
    if measure is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return float(measure(wanted, made, sample_rate))
        except RuntimeWarning:  # less than 0.4 s that isn't silent
            return None


@functools.cache
def measure_of(module: str, name: str) -> Callable[..., Any] | None:
    """A function of a module that need not be installed; the first time it isn't, say so."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        logger.info("%s is not measured: %s isn't installed (pip install %s)", name.upper(), module, _FROM[module])
        return None


class Drawn:
    """The clips of a test that are kept: the first by lot so far, and the worst if it is said how good they are."""

    def __init__(self) -> None:
        self._lots: list[str] = []
        self._qualities: list[float] = []

    def take(self, name: str, sound: np.ndarray, quality: float = math.inf) -> np.ndarray | None:
        """Return a clip in 16 bits if it is among those that are kept."""
        self._lots = sorted([*self._lots, lot(name)])[:KEPT]
        self._qualities = sorted([*self._qualities, quality])[:KEPT]
        kept = lot(name) in self._lots or math.inf > quality <= self._qualities[-1]
        return (sound.clip(-1, 1) * 32767).round().astype(np.int16) if kept else None


def first_drawn(rows: Sequence[Row], quality: Callable[[Row], float] = lambda row: math.inf) -> list[Row]:
    """Return the rows of all ranks, of which only the ``KEPT`` first drawn and the ``KEPT`` worst still have their
    sound."""
    last = max(sorted(lot(row.id) for row in rows)[:KEPT], default="")
    worst = max(sorted(map(quality, rows))[:KEPT], default=math.inf)
    return [row if lot(row.id) <= last or math.inf > quality(row) <= worst else row._replace(sound=None)
            for row in rows]


def lot(name: str) -> str:
    """Draw an utterance's place among all, the same in each run and on any number of ranks."""
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


class SpeechTask(Task):
    """A task whose tests make speech, which a recogniser may hear, and of which a few clips are kept."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.heard: Callable[[Sequence[np.ndarray]], list[str]] | None = None
        """Transcribes waveforms [S] at the recipe's sample rate."""
        self.batch_seconds = 0.0
        """How long it took to make the last batch's speech."""
        self.drawn = Drawn()

    def take_recogniser(self, heard: Callable[[Sequence[np.ndarray]], list[str]]) -> None:
        """Let a recogniser hear the recordings of a test, and what was made."""
        self.heard = heard

    def open_stage(self, stage: Stage, epoch: int | None = None) -> None:
        """Begin to listen anew."""
        self.drawn = Drawn()
        super().open_stage(stage, epoch)

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Measure a batch inside this context, until the device has done it."""
        _wait(device)
        began = time.perf_counter()
        yield
        _wait(device)
        self.batch_seconds = time.perf_counter() - began

    def hear(self, wanted: Sequence[np.ndarray], made: Sequence[np.ndarray]) -> Iterable[tuple[str | None, str | None]]:
        """Transcribe recordings and what was made of each; None without a recogniser."""
        heard = [None] * 2 * len(made) if self.heard is None else self.heard([*wanted, *made])
        return zip(heard[:len(made)], heard[len(made):], strict=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
