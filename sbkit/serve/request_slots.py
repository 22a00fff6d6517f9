"""How many requests run or wait at once, and the threads that process them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sbkit.serve.clients import FairQueue, Shares
from sbkit.serve.limits import Limits

T = TypeVar("T")
_NEWEST = 0.2  # weight of the newest request in a moving average


class RequestSlots:
    """Slots for requests, and the threads that process them."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.queue = FairQueue(limits.max_active, limits.client_share)
        """For the threads of requests."""
        self.average_thread_seconds = 0.0
        """Moving average of the seconds that a request takes in its thread."""
        self._average_seconds = 1.0  # of whole requests, with their waiting
        self._shares = Shares(limits.max_requests, limits.client_share)
        self._threads = ThreadPoolExecutor(limits.max_active, thread_name_prefix="sbkit-request")
        self._short_tasks = ThreadPoolExecutor(limits.max_active, thread_name_prefix="sbkit-short")

    @property
    def active(self) -> int:
        """Requests that run or wait."""
        return self._shares.active

    @contextlib.contextmanager
    def slot(self, client: str | None = None) -> Iterator[None]:
        """Hold a slot for one request of a client; raises ``ApiError`` 429 if there is none."""
        wait = self._average_seconds * self.active / self.limits.max_active
        with self._shares.slot(client, "requests running or waiting", wait):
            started = time.monotonic()
            try:
                yield
            finally:
                self._average_seconds += _NEWEST * (time.monotonic() - started - self._average_seconds)

    def start(self, call: Callable[[], T], client: str | None) -> Future[T]:
        """Start a call in a thread, for a client who has a slot in :attr:`queue`; its end releases the slot."""
        started = time.monotonic()

        def on_end(future: Future[T]) -> None:
            seconds = time.monotonic() - started
            succeeded = not future.cancelled() and future.exception() is None
            # A request that failed early says nothing of how long the others take.
            if succeeded or seconds > self.average_thread_seconds:
                self.average_thread_seconds += _NEWEST * (seconds - self.average_thread_seconds)
            self.queue.release(client)

        future = self._threads.submit(call)
        future.add_done_callback(on_end)
        return future

    async def run_in_thread(self, call: Callable[..., T], *values: Any) -> T:
        """Run a call of milliseconds, in a thread that no long call can occupy."""
        return await asyncio.get_running_loop().run_in_executor(self._short_tasks, call, *values)

    def close(self) -> None:
        for threads in (self._threads, self._short_tasks):
            threads.shutdown(wait=False, cancel_futures=True)
