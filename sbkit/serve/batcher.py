"""Batches signals of many requests for one model: the next batch fills while one runs, without extra waiting."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

from sbkit.infer.device import OutOfMemory
from sbkit.infer.engine import Engine
from sbkit.infer.pipeline import batch_seconds
from sbkit.infer.voice_engine import VoiceEngine
from sbkit.serve.backlog import Backlog

_ROWS = 32
_LONG = 5.0  # seconds of audio, or symbols
_MEASURED = 1.0  # seconds, after which a speed is known well enough


class _Query(NamedTuple):
    signal: Sized
    future: Future[Any]
    client: str | None


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
        self._rows = _ROWS if batching and engine.config.batching else 1
        self._budget = budget or (seconds or batch_seconds(engine.running.device)) * engine.config.sample_rate
        self._log = log or (lambda rows: None)
        self._lock = threading.Lock()
        self._waiting: list[_Query] = []
        self._retry: deque[_Query] = deque()
        self._turns: dict[str | None, int] = {}  # the last batch that began with a client's
        self._batches = 0
        self._running = False
        self._started = 0.0
        self._cost = cost or (lambda signal: len(signal) / engine.config.sample_rate)
        self.backlog = Backlog(unit)
        """Work that is left for the active requests."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy_seconds(self) -> float:
        """How long the current batch has been running; 0 if there is none."""
        return time.monotonic() - self._started if self._running else 0.0

    def measure(self, signal: Sized) -> None:
        """Run full batches of a signal before the first request, so that the speed is known from then on."""
        full = max(1, min(self._rows, int(self._budget // len(signal))))
        with contextlib.suppress(OutOfMemory):  # a batch that is too large is split while serving
            for rows in (1, full, full):
                began = time.monotonic()
                batch: list[Any] = [signal] * rows  # whatever the engine takes
                self.engine.submit(batch).result()
                seconds = time.monotonic() - began
                self.backlog.record_batch(self._cost(signal) * rows, seconds)
                if seconds > _MEASURED:
                    break

    def submit(self, signal: Sized, client: str | None = None) -> Future[Any]:
        """Queue a signal [S] or a line; the future's result is log-probabilities [T, V] or speech; it can be
        cancelled before its turn."""
        query = _Query(signal, Future(), client)
        with self._lock:
            self._waiting.append(query)
        self._start_next()
        return query.future

    def _start_next(self) -> None:
        """Start the next batch, unless one is running. Its end calls this again, in the model's thread."""
        with self._lock:
            if self._running:
                return
            if self._retry:
                batch = [self._retry.popleft()]
            else:
                # The oldest signal of the client whose turn it is, and those of the most similar length that fit in a
                # batch with it.
                by_turn = sorted(self._waiting, key=lambda each: self._turns.get(each.client, 0))
                oldest = next((each for each in by_turn if each.future.set_running_or_notify_cancel()), None)
                rest = [each for each in self._waiting if not (each is oldest or each.future.cancelled())]
                self._waiting = rest
                if oldest is None:
                    return
                self._batches += 1
                waiting = {each.client for each in rest}
                self._turns = {client: at for client, at in self._turns.items() if client in waiting}
                self._turns[oldest.client] = self._batches
                batch, longest = [oldest], len(oldest.signal)
                for other in sorted(rest, key=lambda each: abs(len(each.signal) - len(batch[0].signal))):
                    if len(batch) >= self._rows:
                        break
                    padded = max(longest, len(other.signal))
                    if padded * (len(batch) + 1) <= self._budget and other.future.set_running_or_notify_cancel():
                        batch.append(other)
                        longest = padded
                self._waiting = [each for each in rest if not (each.future.running() or each.future.cancelled())]
            self._running, self._started = True, time.monotonic()
        self._log(len(batch))
        try:
            signals: list[Any] = [each.signal for each in batch]
            future = self.engine.submit(signals)
        except Exception as error:
            self._finish(batch, [error] * len(batch))
        else:
            future.add_done_callback(lambda done: self._done(batch, done))

    def _done(self, batch: list[_Query], done: Future[Any]) -> None:
        error = CancelledError() if done.cancelled() else done.exception()
        if error is None:
            costs = [self._cost(each.signal) for each in batch]
            if max(costs) >= _LONG:  # the speed of short ones is not that of long ones
                self.backlog.record_batch(sum(costs), self.busy_seconds)
            self._finish(batch, done.result())
        elif len(batch) > 1 and self.engine.fault is None and not done.cancelled():
            self._retry.extend(batch)  # each alone, so that one can't make another fail
            self._finish([], [])
        else:
            self._finish(batch, [error] * len(batch))

    def _finish(self, batch: list[_Query], results: Sequence[Any]) -> None:
        for each, result in zip(batch, results, strict=True):
            if isinstance(result, BaseException):
                each.future.set_exception(result)
            else:
                each.future.set_result(result)
        with self._lock:
            self._running = False
        self._start_next()
