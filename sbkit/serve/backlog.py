"""Work that is queued for a model, by client: a request that can't finish in time is refused at once."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

from sbkit.serve.errors import busy, too_late


class Backlog:
    """Work queued for one model, and the model's speed.

    unit : what work is counted in: seconds of audio, or a voice's symbols
    """

    def __init__(self, unit: str = "s of audio") -> None:
        self.unit = unit
        self._lock = threading.Lock()
        self._remaining: dict[str | None, float] = defaultdict(float)
        self._speed = 0.0

    @property
    def speed(self) -> float | None:
        """Units a second in the best batch; None while that is unknown."""
        return self._speed or None

    def record_batch(self, units: float, seconds: float) -> None:
        """Record the units and seconds of a batch."""
        self._speed = max(self._speed, units / max(seconds, 1e-6))

    def seconds(self, client: str | None) -> float:
        """How long the model needs for a client's remaining work; 0 while the speed is unknown."""
        with self._lock:
            return self._remaining.get(client, 0.0) / self._speed if self._speed else 0.0


class Work:
    """The work of one request: an estimate, which grows and may be corrected, minus what is done.

    share : for one client, of what can be done within a request's time limit; a single request may be larger
    seconds, until : the time limit of a request, and this one's deadline
    """

    def __init__(self, backlog: Backlog, client: str | None, share: float, seconds: float, until: float):
        self._backlog, self._client, self._share = backlog, client, share
        self._limit, self._until = seconds, until
        self._total = self._done = 0.0

    def grow(self, units: float) -> None:
        """Grow the estimate to ``units``; raises ``ApiError`` if they can't be done in time, or not with all others."""
        backlog, more = self._backlog, units - self._total
        if more <= 0:
            return
        with backlog._lock:
            own = backlog._remaining[self._client] + more
            speed, others = backlog.speed, own - (units - self._done)
            if speed is not None:
                self._check_deadline(speed, units - self._done)
                limit = self._share * speed * self._limit
                if self._client is not None and others > 0 and own > limit:
                    raise busy(f"your address has {others:.0f} {backlog.unit} in progress; with this request, the "
                               f"limit is {limit:.0f}", others / speed)
                ahead = sum(min(left, own) for client, left in backlog._remaining.items() if client != self._client)
                if (own + ahead) / speed > self._until - time.monotonic():
                    raise busy(f"{others + ahead:.0f} {backlog.unit} are ahead of this request, which can't finish "
                               "within the time limit", (others + ahead) / speed)
            backlog._remaining[self._client] = own
            self._total = units

    def correct(self, units: float) -> None:
        """Shrink the estimate to ``units``, after a header claimed more."""
        with self._backlog._lock:
            self._finish(self._total - units)
            self._total, self._done = units, 0.0

    def done(self, units: float) -> None:
        """Record that ``units`` are done; raises ``ApiError`` if the rest can't be done in time."""
        with self._backlog._lock:
            self._finish(min(units, self._total) - self._done)
        if self._backlog.speed is not None:
            self._check_deadline(self._backlog.speed, self._total - self._done)

    def close(self) -> None:
        with self._backlog._lock:
            self._finish(self._total - self._done)

    def _finish(self, units: float) -> None:
        self._done += units
        self._backlog._remaining[self._client] -= units
        if self._backlog._remaining[self._client] < 1e-6:
            del self._backlog._remaining[self._client]

    def _check_deadline(self, speed: float, left: float) -> None:
        if left / speed > self._until - time.monotonic():
            raise too_late(self._limit)
