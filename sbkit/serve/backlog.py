"""The seconds of audio that a model has left to hear, by client: what can't be heard in time is refused at once."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

from sbkit.serve.errors import busy, too_late

_MEASURED = 5  # batches, after which the speed is believed


class Backlog:
    """Audio in work for one model, and how fast it is heard."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[str | None, float] = defaultdict(float)
        self._best, self._batches = 0.0, 0

    @property
    def speed(self) -> float | None:
        """Seconds of audio a second in the best batch; None while that is unknown."""
        return self._best if self._batches >= _MEASURED else None

    def ran(self, audio: float, seconds: float) -> None:
        """Note that a batch of ``audio`` seconds took so many."""
        self._best, self._batches = max(self._best, audio / max(seconds, 1e-6)), self._batches + 1

    def hold(self, client: str | None, share: float, seconds: float, until: float) -> Audio:
        """Hold the audio of a request, none at first.

        Arguments
        ---------
        share : of the audio that can be heard within the limit of a request, for one client; a single recording may
            be longer
        seconds, until : the limit of a request, and when it ends for this one
        """
        return Audio(self, client, share, seconds, until)


class Audio:
    """The audio of one request: an estimate first, corrected while it is decoded, less what was heard."""

    def __init__(self, backlog: Backlog, client: str | None, share: float, seconds: float, until: float):
        self._backlog, self._client, self._share = backlog, client, share
        self._limit, self._until = seconds, until
        self._whole = self._heard = 0.0

    def grow(self, seconds: float) -> None:
        """Be so many seconds long; raises ``ApiError`` if they can't be heard in time, or not beside the others."""
        backlog, more = self._backlog, seconds - self._whole
        if more <= 0:
            return
        with backlog._lock:
            mine = backlog._left[self._client] + more
            speed, others = backlog.speed, mine - (seconds - self._heard)
            if speed is not None:
                self._in_time(speed, seconds - self._heard)
                most = self._share * speed * self._limit
                if self._client is not None and others > 0 and mine > most:
                    raise busy(f"your address has {others:.0f} s of audio in work, and may have {most:.0f} s",
                               others / speed)
                ahead = sum(min(left, mine) for client, left in backlog._left.items() if client != self._client)
                if (mine + ahead) / speed > self._until - time.monotonic():
                    raise busy(f"with {others + ahead:.0f} s of audio before it, yours can't be heard within the limit",
                               (others + ahead) / speed)
            backlog._left[self._client] = mine
            self._whole = seconds

    def keep(self, seconds: float) -> None:
        """Shrink to so many seconds: the header claimed more than there is."""
        with self._backlog._lock:
            self._take(self._whole - seconds)
            self._whole, self._heard = seconds, 0.0

    def heard(self, seconds: float) -> None:
        """So many of them were heard; raises ``ApiError`` if the rest can't be in time."""
        with self._backlog._lock:
            self._take(min(seconds, self._whole) - self._heard)
        if self._backlog.speed is not None:
            self._in_time(self._backlog.speed, self._whole - self._heard)

    def close(self) -> None:
        """Nothing of it is left to hear."""
        with self._backlog._lock:
            self._take(self._whole - self._heard)

    def _take(self, seconds: float) -> None:
        self._heard += seconds
        self._backlog._left[self._client] -= seconds
        if self._backlog._left[self._client] < 1e-6:
            del self._backlog._left[self._client]

    def _in_time(self, speed: float, left: float) -> None:
        if left / speed > self._until - time.monotonic():
            raise too_late(self._limit)
