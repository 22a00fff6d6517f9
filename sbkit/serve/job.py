"""One request's work: it can be cancelled from outside at any time, and then nothing of it goes on."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any


class Cancelled(Exception):
    """The client left, or the deadline passed."""


class Job:
    """What the threads that work on a request look at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._waiting: set[Future[Any]] = set()

    @property
    def cancelled(self) -> bool:
        """Whether to stop."""
        return self._cancelled

    def check(self) -> None:
        """Stop here if nobody wants the answer any more."""
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Take what waits out of the queues; what runs is noticed by ``check``."""
        with self._lock:
            self._cancelled = True
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            future.cancel()

    def watch(self, future: Future[Any]) -> Future[Any]:
        """A future of this job's: cancelled with it."""
        with self._lock:
            cancelled = self._cancelled
            if not cancelled:
                self._waiting.add(future)
        if cancelled:
            future.cancel()
        else:
            future.add_done_callback(self._forget)  # without the lock: what is done already calls at once
        return future

    def result(self, future: Future[Any]) -> Any:
        """Wait for one."""
        self.check()
        try:
            return future.result()
        except BaseException:
            self.check()
            raise

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._waiting.discard(future)
