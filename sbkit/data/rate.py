"""How fast data workers read a corpus, and what to do if its format can't feed the devices."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sbkit.data.audio import AudioError
from sbkit.data.reader import Reader
from sbkit.system.console import counted

#: Recordings that are read to measure how fast a worker is.
SAMPLED = 16


class ReadingRate(NamedTuple):
    """What one worker reads."""

    rate: float
    """Seconds of audio in a second of a core."""
    kinds: str
    """The suffixes of its files."""
    recordings: int

    def advice(self, workers: int, wanted: float, devices: int = 1) -> tuple[str, str] | None:
        """Say that workers read less than a device trains on, and what to do; None if they keep up.

        workers : of each device
        wanted : seconds of audio that a device could train on in a second
        """
        if not self.rate or not workers or workers * self.rate >= wanted:
            return None
        needed = math.ceil(wanted / self.rate)
        return (
            f"{counted(workers, 'data worker')} can read {workers * self.rate:,.0f} s of this corpus in a second "
            f"({self.kinds}: {self.rate:,.0f} each, by {counted(self.recordings, 'recording')}), but each device could "
            f"train on about {wanted:,.0f}",
            f"use --num_workers {needed} if there are {needed * devices} cores, or convert the corpus once: WAV at the "
            "model's rate is read fastest (sbkit shard MANIFEST.csv SHARDS --encode wav16k)")


def measure(reader: Reader) -> ReadingRate:
    """Read some recordings as a worker does.

    The processor's time counts, so that neither other processes nor a disk that hasn't read them before do.
    """
    manifest = reader.manifest
    rows = np.linspace(0, len(manifest) - 1, min(SAMPLED, len(manifest))).astype(int).tolist()
    seconds = 0.0
    began = time.thread_time()
    for row in rows:
        with contextlib.suppress(AudioError):
            reader.signals(row, manifest.ids[row], 1, reader.as_stored)
            seconds += float(manifest.durations[row])
    rate = seconds / max(time.thread_time() - began, 1e-6)
    kinds = sorted({Path(manifest.wavs[row].partition("?")[0]).suffix.lstrip(".") for row in rows})
    return ReadingRate(rate, ", ".join(kinds), len(rows))
