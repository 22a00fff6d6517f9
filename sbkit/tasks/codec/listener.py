"""Measures of a codec's test clips: how intelligible they are, what a recogniser hears in them, how long they took."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sbkit.tasks.codec.rows import Row

logger = logging.getLogger(__name__)

#: Clips that a report lets one hear.
KEPT = 10
#: Rates at which PESQ is defined, and the names of its two kinds.
_PESQ = {8_000: "nb", 16_000: "wb"}
#: What to install for each measure.
_FROM = {"pystoi": "'sbkit[speech]'", "pesq": "pesq"}


class Listener:
    """Measures each clip of a test, and keeps a few of them."""

    def __init__(self, sample_rate: int):
        self.sample_rate = sample_rate
        self.recogniser: Callable[[Sequence[np.ndarray]], list[str]] | None = None
        """Transcribes waveforms [S] at the codec's sample rate."""
        self.begin()

    def begin(self) -> None:
        """Forget the clips of an earlier test."""
        self._took = 0.0
        self._kept: list[str] = []

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Measure how long a batch takes inside this context, until the device has done it."""
        _wait(device)
        began = time.perf_counter()
        yield
        _wait(device)
        self._took = time.perf_counter() - began

    def hear(self, rows: Sequence[Row], wanted: np.ndarray, made: np.ndarray) -> list[Row]:
        """Return rows with all measures, for the recordings and what was made of them, [B, S] each."""
        whole = sum(row.samples for row in rows)
        pairs = [(wanted[i, :row.samples], made[i, :row.samples]) for i, row in enumerate(rows)]
        heard: Sequence[str | None] = [None] * 2 * len(rows)
        if self.recogniser is not None:
            heard = self.recogniser([*(before for before, _ in pairs), *(after for _, after in pairs)])
        return [row._replace(seconds=self._took * row.samples / whole, stoi=stoi(*pair, self.sample_rate),
                             pesq=pesq(*pair, self.sample_rate), heard=heard[i], heard_again=heard[len(rows) + i],
                             sound=self._taken(row.id, pair[1]))
                for i, (row, pair) in enumerate(zip(rows, pairs, strict=True))]

    def _taken(self, name: str, sound: np.ndarray) -> np.ndarray | None:
        """Return the clip in 16 bits if it is among the first ``KEPT`` so far by ``lot``."""
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


def stoi(wanted: np.ndarray, made: np.ndarray, sample_rate: int) -> float | None:
    """Compute the short-time objective intelligibility, at most 1; None for a clip that has too little speech, and
    where pystoi is not installed."""
    measure = _measure("pystoi", "stoi")
    if measure is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return float(measure(wanted, made, sample_rate))
        except RuntimeWarning:  # less than 0.4 s that isn't silent
            return None


def pesq(wanted: np.ndarray, made: np.ndarray, sample_rate: int) -> float | None:
    """Compute the perceptual evaluation of speech quality, 1 to 4.64; None for a clip without speech, at other rates
    than PESQ's own, and where pesq is not installed."""
    measure = _measure("pesq", "pesq")
    if measure is None or sample_rate not in _PESQ:
        return None
    score = measure(sample_rate, wanted, made, _PESQ[sample_rate], on_error=1)
    return float(score) if score > 0 else None  # -1: no speech was found


@functools.cache
def _measure(module: str, name: str) -> Callable[..., Any] | None:
    """A function of a module that need not be installed; the first time it isn't, say so."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        logger.info("%s is not measured: %s isn't installed (pip install %s)", name.upper(), module, _FROM[module])
        return None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
