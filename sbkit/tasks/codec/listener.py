"""Measures of a codec's test clips: how intelligible they are, what a recogniser hears in them, how long they took."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sbkit.tasks.codec.results import CodecRow
from sbkit.tasks.listening import Clock, Drawn, measure_of, stoi

#: Rates at which PESQ is defined, and the names of its two kinds.
_PESQ = {8_000: "nb", 16_000: "wb"}


class Listener:
    """Measures each clip of a test, and keeps a few of them."""

    def __init__(self, sample_rate: int):
        self.sample_rate = sample_rate
        self.recogniser: Callable[[Sequence[np.ndarray]], list[str]] | None = None
        """Transcribes waveforms [S] at the codec's sample rate."""
        self.begin()

    def begin(self) -> None:
        """Forget the clips of an earlier test."""
        self.clock, self._drawn = Clock(), Drawn()

    def measure(self, rows: Sequence[CodecRow], wanted: np.ndarray, made: np.ndarray) -> list[CodecRow]:
        """Return rows with all measures, for the recordings and what was made of them, [B, S] each."""
        whole = sum(row.samples for row in rows)
        pairs = [(wanted[i, :row.samples], made[i, :row.samples]) for i, row in enumerate(rows)]
        heard: Sequence[str | None] = [None] * 2 * len(rows)
        if self.recogniser is not None:
            heard = self.recogniser([*(before for before, _ in pairs), *(after for _, after in pairs)])
        return [row._replace(seconds=self.clock.seconds * row.samples / whole, stoi=stoi(*pair, self.sample_rate),
                             pesq=pesq(*pair, self.sample_rate), heard=heard[i], heard_again=heard[len(rows) + i],
                             sound=self._drawn.take(row.id, pair[1]))
                for i, (row, pair) in enumerate(zip(rows, pairs, strict=True))]


def pesq(wanted: np.ndarray, made: np.ndarray, sample_rate: int) -> float | None:
    """Compute the perceptual evaluation of speech quality, 1 to 4.64; None for a clip without speech, at other rates
    than PESQ's own, and where pesq is not installed."""
    measure = measure_of("pesq", "pesq")
    if measure is None or sample_rate not in _PESQ:
        return None
    score = measure(sample_rate, wanted, made, _PESQ[sample_rate], on_error=1)
    return float(score) if score > 0 else None  # -1: no speech was found
