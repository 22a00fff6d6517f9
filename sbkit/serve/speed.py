"""How fast a model works, by which a server decides what it can accept; and how much work an upload will be."""

from __future__ import annotations

import math
import time

#: Seconds after which a measurement weighs about a third of a new one.
_MEMORY_SECONDS = 5.0
#: Seconds without work after which what slowed the last batches down counts about a third.
_RELAX_SECONDS = 30.0
#: Bytes of an upload per unit, until some were decoded: a second of a WAV file of 16 kHz and 16 bits.
_BYTES_PER_UNIT = 32_000.0
#: Share of what the model could do within a time limit that is uploaded at once, until a batch of uploads has run. How
#: fast uploads are read is not known before: too many at once would all be late, so no batch would ever run.
_FIRST_SHARE = 0.25
#: Units in uploads after which older ones count half.
_UNITS_KEPT = 3600.0


class Speed:
    """How fast a model works: recently, over all the time in which it had work, and in its best batch."""

    def __init__(self) -> None:
        self.best = 0.0
        """Units a second of the fastest batch; 0: none has run."""
        self._units = 0.0  # of all batches, and their seconds; both fade
        self._seconds = 0.0
        self._measured_at = 0.0

    def record(self, units: float, seconds: float) -> None:
        """Count a batch."""
        seconds = max(seconds, 1e-6)
        now = time.monotonic()
        weight = math.exp((self._measured_at - now) / _MEMORY_SECONDS)
        self._units = self._units * weight + units
        self._seconds = self._seconds * weight + seconds
        self._measured_at = now
        self.best = max(self.best, units / seconds)

    def recent(self, idle: bool) -> float:
        """Units a second; 0 while that is unknown.

        idle : whether the model has no work now. What slowed it down may be over, and nothing measures it, so the speed
            slowly returns to the best one. Otherwise a slow moment could refuse all later requests for ever.
        """
        if not self._seconds:
            return 0.0
        recent = self._units / self._seconds
        weight = math.exp((self._measured_at - time.monotonic()) / _RELAX_SECONDS) if idle else 1.0
        return weight * recent + (1 - weight) * self.best


class UploadEstimate:
    """How much work an upload of so many bytes will be, and how many are read at once before that is known to go well.
    """

    def __init__(self) -> None:
        self.max_share: float | None = _FIRST_SHARE
        """Share of what the model can do in a time limit that may be uploaded at once; None: as much as there is room
        for, because a batch of uploads has run, so that their speed is known."""
        self._units = 0.0
        self._bytes = 0.0

    def record(self, units: float, size: int) -> None:
        """Count an upload of so many bytes that was decoded."""
        self._units += units
        self._bytes += size
        if self._units > _UNITS_KEPT:
            self._units /= 2
            self._bytes /= 2

    def units(self, size: int) -> float:
        """Estimate the units in an upload of so many bytes, by those before it."""
        if not self._units:
            return size / _BYTES_PER_UNIT
        return size * self._units / self._bytes

    def ran(self) -> None:
        """A batch of uploads has run."""
        self.max_share = None

    def was_late(self) -> None:
        """An upload was not read within its time limit: fewer are read at once, until a batch has run."""
        self.max_share = (self.max_share or 2 * _FIRST_SHARE) / 2
