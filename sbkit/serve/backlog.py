"""Work that is accepted for a model, in the order in which it is due: what can't finish in time is refused at once, or
dropped before it takes the model's time."""

from __future__ import annotations

import math
import threading
import time

from sbkit.serve.errors import ApiError, busy, too_late

_MEMORY_SECONDS = 5.0
"""After this time, a measurement weighs about a third of a new one."""

_RELAX_SECONDS = 30.0
"""After this time without work, what slowed the last batches down counts about a third."""

_MARGIN = 0.75
"""Share of the recent speed that a new request may rely on for the work ahead of it. The rest is for a speed that falls
after the request was accepted."""

_STRETCH = 20.0
"""A request is due when this many times the time has passed that it takes alone. So a short one doesn't wait for many
long ones, a long one doesn't wait for ever, and those of equal length go in the order of their deadlines."""

_UPLOAD_BYTES = 32_000.0
"""Bytes of an upload per unit, until some were decoded: a second of a WAV file of 16 kHz and 16 bits."""

_FIRST_UPLOADS = 0.25
"""Share of what the model could do within a time limit that is uploaded at once, until a batch of uploads has run. How
fast uploads are read is not known before: too many at once would all be late, so no batch would ever run."""

_UPLOADS_KEPT = 3600.0
"""Units in uploads after which older ones count half."""


class Speed:
    """How fast a model works: recently, over all the time in which it had work, and in its best batch."""

    def __init__(self) -> None:
        self.best = 0.0
        self._units = self._seconds = 0.0
        self._measured = 0.0

    def record(self, units: float, seconds: float) -> None:
        seconds = max(seconds, 1e-6)
        now = time.monotonic()
        weight = math.exp((self._measured - now) / _MEMORY_SECONDS)
        self._units = self._units * weight + units
        self._seconds = self._seconds * weight + seconds
        self._measured = now
        self.best = max(self.best, units / seconds)

    def recent(self, idle: bool) -> float:
        """Units a second; 0 while that is unknown.

        idle : whether the model has no work now. What slowed it down may be over, and nothing measures it, so the speed
            slowly returns to the best one. Otherwise a slow moment could refuse all later requests for ever.
        """
        if not self._seconds:
            return 0.0
        recent = self._units / self._seconds
        weight = math.exp((self._measured - time.monotonic()) / _RELAX_SECONDS) if idle else 1.0
        return weight * recent + (1 - weight) * self.best


class Backlog:
    """The accepted work of one model, and the model's speed.

    unit : what work is counted in: seconds of audio, or a voice's symbols
    """

    def __init__(self, unit: str = "s of audio") -> None:
        self.unit = unit
        self.running = False
        """Whether the model is running a batch."""
        self._lock = threading.RLock()
        self._works: dict[Work, None] = {}  # in the order of their arrival
        self._speed = Speed()
        self._next_retry = 0.0
        self._upload_units = self._upload_bytes = 0.0
        self._upload_share: float | None = _FIRST_UPLOADS  # None: a batch of uploads has run, so their speed is known

    @property
    def speed(self) -> float | None:
        """Units a second that the model delivered recently; None while that is unknown."""
        return self._speed.recent(idle=not self.running) or None

    def record_batch(self, units: float, seconds: float, uploaded: bool = True) -> None:
        """Record the units of a batch, and the seconds since the batch before it if the model had work all the time.

        uploaded : whether clients sent it; a first batch before any request says nothing of uploads
        """
        with self._lock:
            self._speed.record(units, seconds)
            if uploaded:
                self._upload_share = None

    def record_late_upload(self) -> None:
        """Record that an upload was not read within its time limit: fewer are read at once, until a batch has run."""
        with self._lock:
            self._upload_share = (self._upload_share or 2 * _FIRST_UPLOADS) / 2

    def record_upload(self, units: float, size: int) -> None:
        """Record how much work an upload of so many bytes was."""
        with self._lock:
            self._upload_units += units
            self._upload_bytes += size
            if self._upload_units > _UPLOADS_KEPT:
                self._upload_units /= 2
                self._upload_bytes /= 2

    def expected(self, size: int) -> float:
        """Estimate the units in an upload of so many bytes, by those before it."""
        with self._lock:
            if not self._upload_units:
                return size / _UPLOAD_BYTES
            return size * self._upload_units / self._upload_bytes

    def seconds_alone(self, units: float) -> float:
        """How long work takes at the best speed; a model of unknown speed does a unit a second."""
        return units / (self._speed.best or 1.0)

    def late(self, upload: Work | None = None) -> dict[Work, float]:
        """Find the works that can't finish in time after those that are due before them, and by how many seconds. A
        late one leaves its place to those behind it.

        upload : whose turn comes next; all others count once they are decoded, because their clients may be slow
        """
        with self._lock:
            late: dict[Work, float] = {}
            speed = self.speed
            if speed is None:
                return late
            now = time.monotonic()
            ahead = 0.0
            for work in self._in_order():
                if work.started or work is upload:
                    excess = (ahead + work.remaining) / speed - (work.until - now)
                    if excess > 0:
                        late[work] = excess
                    else:
                        ahead += work.remaining
            return late

    def _in_order(self) -> list[Work]:
        return sorted(self._works, key=lambda work: work.due)

    def _check(self, new: Work, units: float) -> None:
        """Raise ``ApiError`` if a new request with ``units`` can't finish in time, or accepted ones no longer could."""
        speed = self.speed
        if speed is None:
            return
        now = time.monotonic()
        if units / speed > new.until - now:
            raise new.error(units, units / speed - (new.until - now))

        limit = new.share * speed * new.seconds
        of_client = sum(work.remaining for work in self._works if work.client == new.client and work is not new)
        if new.client is not None and of_client > 0 and of_client + units > limit:
            raise busy(f"your address has {of_client:.0f} {self.unit} in progress; with this request, the limit is "
                       f"{limit:.0f}", of_client / speed)

        due = new.due_with(units)
        others = [work for work in self._in_order() if work is not new]
        ahead = sum(work.remaining for work in others if work.due <= due)
        excess = ahead / (_MARGIN * speed) + units / speed - (new.until - now)
        if excess > 0:
            raise self._full(ahead, units, excess)

        # What is due later is delayed, and was accepted. Only a recording that is longer than its client's share gets
        # just the time that others leave.
        for work in others:
            if work.due <= due:
                continue
            time_left = work.until - now - work.remaining / speed
            over_share = work.client is not None and work.remaining > limit
            in_time_without = ahead / speed <= time_left
            excess = (ahead + units) / (_MARGIN * speed) - time_left
            if not over_share and in_time_without and excess > 0:
                raise self._full(ahead, units, excess)
            ahead += work.remaining

    def _full(self, ahead: float, units: float, excess: float) -> ApiError:
        """Make the error for a request of ``units`` that would be late, or make others late, by ``excess`` seconds.

        Clients are asked back one after another, as fast as there is room for them, and at the latest when nothing is
        ahead any more: all at once, they would take the time of the accepted ones.
        """
        speed = self.speed
        assert speed is not None, "only a known speed shows that there is no room"
        now = time.monotonic()
        retry = max(now + excess, self._next_retry)
        self._next_retry = retry + units / speed
        wait = min(retry - now, max(ahead / speed, excess))
        return busy(f"{ahead:.0f} {self.unit} are ahead of this request, which can't finish within the time limit",
                    wait)


class Work:
    """The work of one request: an estimate, which grows and may be corrected, minus what is done.

    share : the share that one client may have of what can be done within a request's time limit; a single request may
        be larger
    seconds, until : the time limit of a request, and this one's deadline
    """

    def __init__(self, backlog: Backlog, client: str | None, share: float, seconds: float, until: float):
        self.client = client
        self.share = share
        self.seconds = seconds
        self.until = until
        self.started = False
        """Whether decoding its upload has begun, so that the model can work on it."""
        self._backlog = backlog
        self._total = self._done = 0.0
        self._start: float | None = None

    @property
    def remaining(self) -> float:
        return self._total - self._done

    @property
    def due(self) -> float:
        """When it is due: the model works on what is due first."""
        return self.due_with(self._total)

    def due_with(self, units: float) -> float:
        """When it would be due with so many units. What an address asks for is due one after another, so that others
        have their turns between."""
        with self._backlog._lock:  # requests come and go in other threads
            if self._start is None:
                self._start = self.until - self.seconds
                if self.client is not None:
                    dues = [work.due for work in self._backlog._works
                            if work.client == self.client and work is not self]
                    self._start = max([self._start, *dues])
        return self._start + _STRETCH * self._backlog.seconds_alone(units)

    def expect(self, size: int) -> None:
        """Hold room for an upload before it is read; raises ``ApiError`` 429 if there is none.

        size : its bytes; 0: unknown
        """
        backlog = self._backlog
        with backlog._lock:
            speed = backlog.speed
            if speed is None or self._total:
                return
            # An estimate alone refuses nobody: it counts only beside the work of others.
            units = min(backlog.expected(size), speed * (self.until - time.monotonic()) / 2)
            if any(work.remaining for work in backlog._works):
                backlog._check(self, units)
            if backlog._upload_share is not None:
                uploading = sum(work.remaining for work in backlog._works if not work.started)
                if uploading and uploading + units > backlog._upload_share * speed * self.seconds:
                    raise busy(f"other uploads ({uploading:.1f} {backlog.unit}) are read first", units / speed)
            self._set(units)

    def grow(self, units: float) -> None:
        """Grow the estimate to ``units``; raises ``ApiError`` if they can't be done in time, or not with all others."""
        with self._backlog._lock:
            self.started = True
            if units > self._total:
                self._backlog._check(self, units - self._done)
                self._set(units)

    def correct(self, units: float) -> None:
        """Shrink the estimate to ``units``, after a header claimed more."""
        with self._backlog._lock:
            self._done = 0.0
            self._set(units)

    def check(self) -> None:
        """Raise ``ApiError`` if it can't finish in time any more, before it takes the model's time."""
        excess = self._backlog.late(self).get(self)
        if excess is not None:
            raise self.error(self.remaining, excess)

    def computed(self, units: float) -> None:
        """Record that the model did ``units`` more. A batch may hold several parts of a request, which are read one
        after another: the later ones are no work any more while the first is read."""
        with self._backlog._lock:
            self._done = min(self._done + units, self._total)

    def done(self, units: float) -> None:
        """Record that its first ``units`` are done, silence among them, which takes no computing; raises ``ApiError``
        if the rest can't be done in time."""
        with self._backlog._lock:
            self._done = max(self._done, min(units, self._total))
            speed = self._backlog.speed
            if speed is None:
                return
            excess = self.remaining / speed - (self.until - time.monotonic())
            if excess > 0:
                raise self.error(self.remaining, excess)

    def error(self, units: float, excess: float) -> ApiError:
        """Make the error for ``units`` that would be late by ``excess`` seconds. The client should try again only if
        they fit well at the best speed."""
        if self._backlog.seconds_alone(units) > _MARGIN * self.seconds:
            return too_late(self.seconds)
        return busy("this server is slower than it was, and can't finish this request within the time limit", excess)

    def close(self) -> None:
        with self._backlog._lock:
            self._backlog._works.pop(self, None)
            self._total = self._done = 0.0

    def _set(self, units: float) -> None:
        self.due_with(units)  # after what its client asked for before
        self._total = units
        self._backlog._works[self] = None
