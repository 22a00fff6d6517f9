"""Batches what many requests ask of one model: while a batch runs, the next one gathers; nobody waits for company."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

import numpy as np

from sbkit.infer.engine import Engine
from sbkit.infer.pipeline import batch_seconds

_ROWS = 32


class _Query(NamedTuple):
    signal: np.ndarray
    future: Future[Any]


class Batcher:
    """Stands before an engine.

    Arguments
    ---------
    engine : runs the batches, one after another
    seconds : of audio in one batch, padding counted; None for what suits the device
    rows : signals in one batch at most; 1 switches batching off
    told : hears the number of signals in each batch
    """

    def __init__(self, engine: Engine, seconds: float | None = None, rows: int = _ROWS,
                 told: Callable[[int], None] | None = None):
        self.engine = engine
        self._rows = rows if engine.config.batching else 1
        self._budget = (seconds or batch_seconds(engine)) * engine.config.sample_rate
        self._told = told or (lambda rows: None)
        self._lock = threading.Lock()
        self._waiting: deque[_Query] = deque()
        self._again: deque[_Query] = deque()
        self._running = False
        self._since = 0.0

    @property
    def waiting(self) -> int:
        """Signals that no batch has taken yet."""
        return len(self._waiting)

    @property
    def busy_seconds(self) -> float:
        """How long the batch that runs has been running; 0 where none does."""
        return time.monotonic() - self._since if self._running else 0.0

    def submit(self, signal: np.ndarray) -> Future[Any]:
        """Log-probabilities [T, V] of a signal [S], to be waited for; cancelled before its turn it costs nothing."""
        asked = _Query(signal, Future())
        with self._lock:
            self._waiting.append(asked)
        self._feed()
        return asked.future

    def _feed(self) -> None:
        """Begin the next batch, unless one runs. Its end calls this again, in the model's thread."""
        with self._lock:
            if self._running:
                return
            batch = self._take()
            if not batch:
                return
            self._running, self._since = True, time.monotonic()
        self._told(len(batch))
        try:
            future = self.engine.submit([each.signal for each in batch])
        except Exception as error:
            self._finish(batch, [error] * len(batch))
        else:
            future.add_done_callback(lambda done: self._done(batch, done))

    def _take(self) -> list[_Query]:
        """The oldest, and of the others those of the most similar length that fit in with it."""
        if self._again:
            return [self._again.popleft()]
        oldest = None
        while oldest is None and self._waiting:
            asked = self._waiting.popleft()
            if asked.future.set_running_or_notify_cancel():
                oldest = asked
        if oldest is None:
            return []
        batch, longest = [oldest], len(oldest.signal)
        for other in sorted(self._waiting, key=lambda each: abs(len(each.signal) - len(oldest.signal))):
            if len(batch) >= self._rows:
                break
            padded = max(longest, len(other.signal))
            if padded * (len(batch) + 1) <= self._budget and other.future.set_running_or_notify_cancel():
                batch.append(other)
                longest = padded
        taken = set(map(id, batch))
        self._waiting = deque(each for each in self._waiting if id(each) not in taken and not each.future.cancelled())
        return batch

    def _done(self, batch: list[_Query], done: Future[Any]) -> None:
        error = CancelledError() if done.cancelled() else done.exception()
        if error is None:
            self._finish(batch, done.result())
        elif len(batch) > 1 and self.engine.fault is None and not done.cancelled():
            self._again.extend(batch)  # each alone: one must not fail for another
            self._finish([], [])
        else:
            self._finish(batch, [error] * len(batch))

    def _finish(self, batch: list[_Query], results: Sequence[np.ndarray | BaseException]) -> None:
        """Hand out what came, and go on."""
        for each, result in zip(batch, results, strict=True):
            if isinstance(result, BaseException):
                each.future.set_exception(result)
            else:
                each.future.set_result(result)
        with self._lock:
            self._running = False
        self._feed()
