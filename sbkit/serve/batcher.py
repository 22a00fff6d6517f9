"""Batches signals of many requests for one model: the next batch fills while one runs, without extra waiting, and
begins with the signal that is due first."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

from sbkit.infer.batches import batch_seconds, rows_within
from sbkit.infer.device import OutOfMemory
from sbkit.infer.engine import Engine
from sbkit.infer.voice_engine import VoiceEngine
from sbkit.serve.backlog import Backlog, Work
from sbkit.serve.errors import ApiError

#: Signals in a batch.
_MAX_ROWS = 32
#: Units of work (seconds of audio, or symbols) of the longest signal in a batch that shows the speed.
_LONG = 5.0
#: Lengths of a ratio up to this are alike.
_LIKE = 1.25
#: Seconds of a batch after which the speed is known well enough.
_MEASURED = 1.0


class _Query(NamedTuple):
    """A signal that waits for its batch."""

    signal: Sized
    future: Future[Any]
    client: str | None
    work: Work | None
    """Of its request; None: it is of live speech."""
    due: float
    """When it is due among those of live speech."""

    @property
    def order(self) -> tuple[bool, float]:
        """The key to sort by: live speech before recordings, each in the order in which it is due."""
        if self.work is None:
            return False, self.due
        return True, self.work.due


class Batcher:
    """Batches calls to an engine, of signals or of a voice's lines.

    engine : runs the batches, one after another
    seconds : seconds of audio in one batch, including padding; None for the device's default
    budget : the same as a length in samples, or a voice's symbols; overrides ``seconds``
    batching : False runs each signal by itself
    log : called with the number of signals of each batch
    unit, cost : the unit of work, and a function that measures a signal in it; seconds of audio by default
    """

    def __init__(self, engine: Engine | VoiceEngine, seconds: float | None = None, batching: bool = True,
                 log: Callable[[int], None] | None = None, budget: float | None = None, unit: str = "s of audio",
                 cost: Callable[[Any], float] | None = None):
        self.engine = engine
        self._rows = _MAX_ROWS if batching and engine.config.batching else 1
        seconds = seconds or batch_seconds(engine.running.device)
        self._budget = budget or seconds * engine.config.sample_rate
        self._log = log or (lambda rows: None)
        self._lock = threading.Lock()
        self._waiting: list[_Query] = []
        self._retry: deque[_Query] = deque()
        """Those of a batch that failed, which run alone."""
        self._turns_end: dict[str | None, float] = {}
        """When the live speech of each client that waits now will be done, one signal after the other."""
        self._running = False
        self._started = 0.0
        self._busy_since = 0.0
        """Since when the model has had work: the end of the batch before, if this one was waiting by then."""
        self._cost = cost or (lambda signal: len(signal) / engine.config.sample_rate)
        self.backlog = Backlog(unit)
        """Work that is left for the active requests."""

    @property
    def waiting(self) -> int:
        """How many signals wait for a batch."""
        return len(self._waiting)

    @property
    def busy_seconds(self) -> float:
        """How long the current batch has been running; 0 if there is none."""
        return time.monotonic() - self._started if self._running else 0.0

    def measure(self, signal: Sized) -> None:
        """Run full batches of a signal before the first request, so that the speed is known from then on."""
        full = min(self._rows, rows_within(self._budget, len(signal)))
        with contextlib.suppress(OutOfMemory):  # a batch that is too large is split while serving
            for rows in (1, full, full):
                began = time.monotonic()
                batch: list[Any] = [signal] * rows  # whatever the engine takes
                self.engine.submit(batch).result()
                seconds = time.monotonic() - began
                self.backlog.record_batch(self._cost(signal) * rows, seconds, uploaded=False)
                if seconds > _MEASURED:
                    break

    def submit(self, signal: Sized, client: str | None = None, work: Work | None = None) -> Future[Any]:
        """Queue a signal [S] or a line; the future's result is log-probabilities [T, V] or speech; it can be
        cancelled before its turn.

        work : of the request, without which a signal goes before those that have one. If it can't finish in time any
            more, the future raises ``ApiError``, and nothing runs.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append(_Query(signal, future, client, work, self._due(signal, client)))
        self._start_next()
        return future

    def _due(self, signal: Sized, client: str | None) -> float:
        """When a signal without work is due: after the others of its client, so that clients have their turns."""
        now = time.monotonic()
        self._turns_end = {client: end for client, end in self._turns_end.items() if end > now}
        due = self._turns_end.get(client, now)
        if client is not None:
            self._turns_end[client] = due + self.backlog.seconds_alone(self._cost(signal))
        return due

    def _start_next(self, ended: float | None = None) -> None:
        """Start the next batch, unless one is running. Its end calls this again, in the model's thread.

        ended : when the batch before ended, if signals were waiting then: what passes until the next one is running is
            part of the model's speed
        """
        with self._lock:
            if self._running:
                return
            dropped = self._drop_late()
            batch = [self._retry.popleft()] if self._retry else self._next_batch()
            self._started = time.monotonic()
            self._busy_since = self._started if ended is None else ended
            self._running = self.backlog.running = bool(batch)
        for query, error in dropped:
            query.future.set_exception(error)
        if not batch:
            return
        self._log(len(batch))
        try:
            signals: list[Any] = [query.signal for query in batch]
            future = self.engine.submit(signals)
        except Exception as error:
            self._finish(batch, [error] * len(batch))
        else:
            future.add_done_callback(lambda future: self._on_end(batch, future))

    def _drop_late(self) -> list[tuple[_Query, ApiError]]:
        """Remove the signals of requests that can't finish in time any more; returns them with their errors."""
        late = self.backlog.late()
        if not late:
            return []
        dropped: list[tuple[_Query, ApiError]] = []
        for query in self._waiting:
            if query.work in late and query.future.set_running_or_notify_cancel():
                dropped.append((query, query.work.error(query.work.remaining, late[query.work])))
        self._waiting = [query for query in self._waiting if query.work not in late]
        return dropped

    def _next_batch(self) -> list[_Query]:
        """Remove and return the signal that is due first, and others of like length that fit in a batch with it."""
        waiting = sorted(self._waiting, key=lambda query: query.order)
        while waiting and not waiting[0].future.set_running_or_notify_cancel():
            del waiting[0]
        self._waiting = waiting
        if not waiting:
            return []

        first, *others = waiting
        batch = [first]
        longest = len(first.signal)
        for query in self._like(first, others):
            if len(batch) >= self._rows:
                break
            padded = max(longest, len(query.signal))
            if padded * (len(batch) + 1) <= self._budget and query.future.set_running_or_notify_cancel():
                batch.append(query)
                longest = padded
        self._waiting = [query for query in others if not (query.future.running() or query.future.cancelled())]
        return batch

    def _like(self, first: _Query, others: list[_Query]) -> list[_Query]:
        """Return those that fit in a batch with ``first``: those of like length first, which cost the least padding,
        and among these what is due first. Otherwise all requests would advance together, and finish late together.

        others : in the order in which they are due, which a sort keeps
        """
        length = max(1, len(first.signal))

        def unlike(query: _Query) -> int:
            return round(abs(math.log(max(1, len(query.signal)) / length) / math.log(_LIKE)))

        fitting = [query for query in others if 2 * max(length, len(query.signal)) <= self._budget]
        return sorted(fitting, key=unlike)

    def _on_end(self, batch: list[_Query], future: Future[Any]) -> None:
        """Record a batch's speed and deliver its results, or let each of its signals run alone if it failed."""
        ended = time.monotonic()
        error = CancelledError() if future.cancelled() else future.exception()
        if error is None:
            costs = [self._cost(query.signal) for query in batch]
            if max(costs) >= _LONG:  # the speed of short ones is not that of long ones
                self.backlog.record_batch(sum(costs), ended - self._busy_since)
            self._finish(batch, future.result(), ended)
        elif len(batch) > 1 and self.engine.fault is None and not future.cancelled():
            self._retry.extend(batch)  # each alone, so that one can't make another fail
            self._finish([], [])
        else:
            self._finish(batch, [error] * len(batch))

    def _finish(self, batch: list[_Query], results: Sequence[Any], ended: float | None = None) -> None:
        """Deliver results or errors, and start the next batch.

        ended : when the batch ended; None: it failed
        """
        for query, result in zip(batch, results, strict=True):
            if isinstance(result, BaseException):
                query.future.set_exception(result)
                continue
            if query.work is not None:
                query.work.computed(self._cost(query.signal))
            query.future.set_result(result)
        with self._lock:
            self._running = self.backlog.running = False
            waited = bool(self._waiting or self._retry)
        self._start_next(ended if waited else None)
