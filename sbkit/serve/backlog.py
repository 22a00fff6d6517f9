"""Work that is accepted for a model, in the order in which it is due: what can't finish in time is refused at once, or
dropped before it takes the model's time."""

from __future__ import annotations

import threading
import time

from sbkit.serve.errors import ApiError, busy, too_late
from sbkit.serve.speed import Speed, UploadEstimate

#: Share of the recent speed that a new request may rely on for the work ahead of it. The rest is for a speed that falls
#: after the request was accepted.
_MARGIN = 0.75
#: A request is due when this many times the time has passed that it takes alone. So a short one doesn't wait for many
#: long ones, a long one doesn't wait for ever, and those of equal length go in the order of their deadlines.
_STRETCH = 20.0


class Work:
    """The work of one request: an estimate, which grows and may be corrected, minus what is done.

    Its request holds it in one thread, the model's thread and other requests read it: all under the backlog's lock.

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
        self._total = 0.0
        self._done = 0.0
        self._turn: float | None = None
        """When its time begins, from which on it becomes due; None: nothing has asked yet."""

    @property
    def remaining(self) -> float:
        return self._total - self._done

    @property
    def due(self) -> float:
        """When it is due: the model works on what is due first."""
        return self.due_with(self._total)

    def due_with(self, units: float) -> float:
        """When it would be due with so many units."""
        with self._backlog.lock:
            return self._begin_turn() + _STRETCH * self._backlog.seconds_alone(units)

    def _begin_turn(self) -> float:
        """Return when its time begins, which is decided once.

        What an address asks for is due one after another, so that others have their turns between.
        """
        if self._turn is None:
            self._turn = self.until - self.seconds
            if self.client is not None:
                self._turn = max([self._turn, *(work.due for work in self._backlog.of_client(self))])
        return self._turn

    # ---------------------------------------------------------------------- the estimate

    def expect(self, size: int) -> None:
        """Hold room for an upload before it is read; raises ``ApiError`` 429 if there is none.

        size : its bytes; 0: unknown
        """
        backlog = self._backlog
        with backlog.lock:
            speed = backlog.speed
            if speed is None or self._total:
                return
            units = min(backlog.uploads.units(size), speed * (self.until - time.monotonic()) / 2)
            if backlog.has_work:  # an estimate alone refuses nobody: it counts only beside the work of others
                backlog.check_room(self, units)
            backlog.check_uploads(self, units)
            self._set(units)

    def grow(self, units: float) -> None:
        """Grow the estimate to ``units``; raises ``ApiError`` if they can't be done in time, or not with all others."""
        with self._backlog.lock:
            self.started = True
            if units > self._total:
                self._backlog.check_room(self, units - self._done)
                self._set(units)

    def correct(self, units: float) -> None:
        """Shrink the estimate to ``units``, after a header claimed more."""
        with self._backlog.lock:
            self._done = 0.0
            self._set(units)

    def _set(self, units: float) -> None:
        self._begin_turn()  # after what its client asked for before
        self._total = units
        self._backlog.add(self)

    # ---------------------------------------------------------------------- what is done

    def computed(self, units: float) -> None:
        """Record that the model did ``units`` more. A batch may hold several parts of a request, which are read one
        after another: the later ones are no work any more while the first is read."""
        with self._backlog.lock:
            self._done = min(self._done + units, self._total)

    def done(self, units: float) -> None:
        """Record that its first ``units`` are done, silence among them, which takes no computing; raises ``ApiError``
        if the rest can't be done in time."""
        with self._backlog.lock:
            self._done = max(self._done, min(units, self._total))
            speed = self._backlog.speed
            if speed is None:
                return
            excess = self.remaining / speed - (self.until - time.monotonic())
            if excess > 0:
                raise self.error(self.remaining, excess)

    def check(self) -> None:
        """Raise ``ApiError`` if it can't finish in time any more, before it takes the model's time."""
        excess = self._backlog.late(self).get(self)
        if excess is not None:
            raise self.error(self.remaining, excess)

    def close(self) -> None:
        """End the request: what is left of it is no work any more."""
        with self._backlog.lock:
            self._backlog.remove(self)
            self._total = 0.0
            self._done = 0.0

    def error(self, units: float, excess: float) -> ApiError:
        """Make the error for ``units`` that would be late by ``excess`` seconds. The client should try again only if
        they fit well at the best speed."""
        if self._backlog.seconds_alone(units) > _MARGIN * self.seconds:
            return too_late(self.seconds)
        return busy("this server is slower than it was, and can't finish this request within the time limit", excess)


class Backlog:
    """The accepted work of one model, and the model's speed.

    unit : what work is counted in: seconds of audio, or a voice's symbols
    """

    def __init__(self, unit: str = "s of audio") -> None:
        self.unit = unit
        self.running = False
        """Whether the model is running a batch."""
        self.lock = threading.RLock()
        """Held while works are read or changed."""
        self.uploads = UploadEstimate()
        self._works: dict[Work, None] = {}  # in the order of their arrival
        self._speed = Speed()
        self._next_retry = 0.0

    # ---------------------------------------------------------------------- the model's speed

    @property
    def speed(self) -> float | None:
        """Units a second that the model delivered recently; None while that is unknown."""
        return self._speed.recent(idle=not self.running) or None

    def seconds_alone(self, units: float) -> float:
        """How long work takes at the best speed; a model of unknown speed does a unit a second."""
        return units / (self._speed.best or 1.0)

    def record_batch(self, units: float, seconds: float, uploaded: bool = True) -> None:
        """Record the units of a batch, and the seconds since the batch before it if the model had work all the time.

        uploaded : whether clients sent it; a first batch before any request says nothing of uploads
        """
        with self.lock:
            self._speed.record(units, seconds)
            if uploaded:
                self.uploads.ran()

    def record_late_upload(self) -> None:
        """Record that an upload was not read within its time limit."""
        with self.lock:
            self.uploads.was_late()

    def record_upload(self, units: float, size: int) -> None:
        """Record how much work an upload of so many bytes was."""
        with self.lock:
            self.uploads.record(units, size)

    # ---------------------------------------------------------------------- the works; called with the lock

    @property
    def has_work(self) -> bool:
        return any(work.remaining for work in self._works)

    def add(self, work: Work) -> None:
        """Add accepted work, if it isn't here yet."""
        self._works[work] = None

    def remove(self, work: Work) -> None:
        self._works.pop(work, None)

    def of_client(self, work: Work) -> list[Work]:
        """Return the other works of the same client."""
        return [other for other in self._works if other.client == work.client and other is not work]

    def _in_order(self) -> list[Work]:
        return sorted(self._works, key=lambda work: work.due)

    def late(self, upload: Work | None = None) -> dict[Work, float]:
        """Find the works that can't finish in time after those that are due before them, and by how many seconds. A
        late one leaves its place to those behind it.

        upload : whose turn comes next; all others count once they are decoded, because their clients may be slow
        """
        with self.lock:
            late: dict[Work, float] = {}
            speed = self.speed
            if speed is None:
                return late
            now = time.monotonic()
            ahead = 0.0
            for work in self._in_order():
                if not work.started and work is not upload:
                    continue
                excess = (ahead + work.remaining) / speed - (work.until - now)
                if excess > 0:
                    late[work] = excess
                else:
                    ahead += work.remaining
            return late

    # ---------------------------------------------------------------------- who is accepted; called with the lock

    def check_room(self, new: Work, units: float) -> None:
        """Raise ``ApiError`` if a new request with ``units`` can't finish in time, or accepted ones no longer could."""
        speed = self.speed
        if speed is None:
            return
        excess = units / speed - (new.until - time.monotonic())
        if excess > 0:
            raise new.error(units, excess)

        max_of_client = new.share * speed * new.seconds
        self._check_share(new, units, max_of_client, speed)
        due = new.due_with(units)
        others = [work for work in self._in_order() if work is not new]
        before = [work for work in others if work.due <= due]
        after = [work for work in others if work.due > due]
        ahead = sum(work.remaining for work in before)
        self._check_in_time(new, units, ahead, speed)
        self._check_those_after(after, units, ahead, max_of_client, speed)

    def check_uploads(self, new: Work, units: float) -> None:
        """Raise ``ApiError`` if too much is uploaded already, while nothing shows how fast uploads are read."""
        speed = self.speed
        assert speed is not None, "only a known speed shows that there is no room"
        if self.uploads.max_share is None:
            return
        uploading = sum(work.remaining for work in self._works if not work.started)
        if uploading and uploading + units > self.uploads.max_share * speed * new.seconds:
            raise busy(f"other uploads ({uploading:.1f} {self.unit}) are read first", units / speed)

    def _check_share(self, new: Work, units: float, max_of_client: float, speed: float) -> None:
        """Raise if the client's other requests and this one are more than its share."""
        if new.client is None:
            return
        of_client = sum(work.remaining for work in self.of_client(new))
        if of_client > 0 and of_client + units > max_of_client:
            raise busy(f"your address has {of_client:.0f} {self.unit} in progress; with this request, the limit is "
                       f"{max_of_client:.0f}", of_client / speed)

    def _check_in_time(self, new: Work, units: float, ahead: float, speed: float) -> None:
        """Raise if the request can't finish in time after the units ahead of it."""
        excess = ahead / (_MARGIN * speed) + units / speed - (new.until - time.monotonic())
        if excess > 0:
            raise self._full(ahead, units, excess, speed)

    def _check_those_after(self, after: list[Work], units: float, ahead: float, max_of_client: float, speed: float
                           ) -> None:
        """Raise if a request with ``units`` would make one late that is due after it, and was accepted before.

        Only a recording that is longer than its client's share gets just the time that others leave.
        """
        now = time.monotonic()
        for work in after:
            time_left = work.until - now - work.remaining / speed
            over_share = work.client is not None and work.remaining > max_of_client
            in_time_without = ahead / speed <= time_left
            excess = (ahead + units) / (_MARGIN * speed) - time_left
            if not over_share and in_time_without and excess > 0:
                raise self._full(ahead, units, excess, speed)
            ahead += work.remaining

    def _full(self, ahead: float, units: float, excess: float, speed: float) -> ApiError:
        """Make the error for a request of ``units`` that would be late, or make others late, by ``excess`` seconds.

        Clients are asked back one after another, as fast as there is room for them, and at the latest when nothing is
        ahead any more: all at once, they would take the time of the accepted ones.
        """
        now = time.monotonic()
        retry = max(now + excess, self._next_retry)
        self._next_retry = retry + units / speed
        wait = min(retry - now, max(ahead / speed, excess))
        return busy(f"{ahead:.0f} {self.unit} are ahead of this request, which can't finish within the time limit",
                    wait)
