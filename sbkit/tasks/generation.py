"""What tests of all tasks that generate audio share: sample clips to listen to, measures, and timing."""

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

#: Clips to listen to in a report: this many at random, and this many of the worst.
SAMPLES = 10
#: What to install for each measure.
_FROM = {"pystoi": "'sbkit[speech]'", "pesq": "pesq"}
Row = Any  # of a test: a task's own NamedTuple, with id, reference, and sound (int16, of clips that are kept)


def stoi(reference: np.ndarray, output: np.ndarray, sample_rate: int) -> float | None:
    """Compute the short-time objective intelligibility, at most 1; None for a clip that has too little speech, and
    where pystoi is not installed."""
    measure = measure_of("pystoi", "stoi")
    if measure is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return float(measure(reference, output, sample_rate))
        except RuntimeWarning:  # less than 0.4 s that isn't silent
            return None


@functools.cache
def measure_of(module: str, name: str) -> Callable[..., Any] | None:
    """Import a function from an optional module; if it isn't installed, log that once and return None."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        logger.info("%s is not measured: %s isn't installed (pip install %s)", name.upper(), module, _FROM[module])
        return None


class ClipSampler:
    """Chooses the clips of a test to keep on this rank: random ones, and the worst if their quality is given."""

    def __init__(self) -> None:
        self._orders: list[str] = []
        self._qualities: list[float] = []

    def keep(self, name: str, sound: np.ndarray, quality: float = math.inf) -> np.ndarray | None:
        """Return a clip in 16 bits if it is one to keep."""
        self._orders = sorted([*self._orders, random_order(name)])[:SAMPLES]
        self._qualities = sorted([*self._qualities, quality])[:SAMPLES]
        kept = random_order(name) in self._orders or math.inf > quality <= self._qualities[-1]
        return (sound.clip(-1, 1) * 32767).round().astype(np.int16) if kept else None


def drop_other_sounds(rows: Sequence[Row], quality: Callable[[Row], float] = lambda row: math.inf) -> list[Row]:
    """Drop the sounds of rows of all ranks, except for ``SAMPLES`` random ones and the ``SAMPLES`` worst."""
    last = max(sorted(random_order(row.id) for row in rows)[:SAMPLES], default="")
    worst = max(sorted(map(quality, rows))[:SAMPLES], default=math.inf)
    return [row if random_order(row.id) <= last or math.inf > quality(row) <= worst else row._replace(sound=None)
            for row in rows]


def random_order(name: str) -> str:
    """Return an utterance's place in a random order, the same in each run and on any number of ranks."""
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


class SpeechTask(Task):
    """A task whose tests generate speech, which a recogniser may transcribe, and of which a few clips are kept."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.transcribe: Callable[[Sequence[np.ndarray]], list[str]] | None = None
        """Transcribes waveforms [S] at the recipe's sample rate; None: there is no recogniser."""
        self.batch_seconds = 0.0
        """How long it took to generate the last batch's speech."""
        self.clips = ClipSampler()

    def take_recogniser(self, transcribe: Callable[[Sequence[np.ndarray]], list[str]]) -> None:
        self.transcribe = transcribe

    def open_stage(self, stage: Stage, epoch: int | None = None) -> None:
        self.clips = ClipSampler()
        super().open_stage(stage, epoch)

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Measure the time of a batch in this context, including the device's."""
        _wait(device)
        began = time.perf_counter()
        yield
        _wait(device)
        self.batch_seconds = time.perf_counter() - began

    def transcripts(self, recordings: Sequence[np.ndarray],
                    outputs: Sequence[np.ndarray]) -> Iterable[tuple[str | None, str | None]]:
        """Transcribe recordings and the output for each; None without a recogniser."""
        count = len(outputs)
        texts = [None] * 2 * count if self.transcribe is None else self.transcribe([*recordings, *outputs])
        return zip(texts[:count], texts[count:], strict=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
