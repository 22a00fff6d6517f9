"""The work of one request, which can be cancelled from outside at any time."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Cancelled(Exception):
    """The client left, or the deadline passed."""


class Job:
    """The client of a request, and whether it was cancelled; shared by the threads that process it."""

    def __init__(self, client: str | None = None) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._cancelled = False
        self._waiting: set[Future[Any]] = set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def check(self) -> None:
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Cancel the job: queued futures are cancelled, running code stops at ``check``."""
        with self._lock:
            self._cancelled = True
            waiting = self._waiting
            self._waiting = set()
        for future in waiting:
            future.cancel()

    def watch(self, future: Future[T]) -> Future[T]:
        """Add a future, which is cancelled with the job."""
        with self._lock:
            cancelled = self._cancelled
            if not cancelled:
                self._waiting.add(future)
        if cancelled:
            future.cancel()
        else:
            future.add_done_callback(self._forget)  # without the lock, because a finished future calls back at once
        return future

    def result(self, future: Future[T]) -> T:
        self.check()
        try:
            return future.result()
        except BaseException:
            self.check()
            raise

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._waiting.discard(future)
