"""Processing of a request: its slot, its deadline, the client's connection, and the worker threads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from sbkit.serve.backlog import Backlog, Work
from sbkit.serve.clients import FairQueue, Shares, address
from sbkit.serve.errors import ApiError, busy, too_late, too_slow
from sbkit.serve.job import Cancelled, Job
from sbkit.serve.limits import Limits
from sbkit.serve.metrics import Metrics

T = TypeVar("T")
_POLL_SECONDS = 0.5  # between checks whether a turn can still come in time
_SMOOTH = 0.2  # weight of the newest request in the mean


class ClientDisconnected(Exception):
    """The client disconnected."""


class RequestSlots:
    """Slots for requests, and the threads that process them."""

    def __init__(self, limits: Limits, metrics: Metrics):
        self._limits, self._metrics = limits, metrics
        self._threads = ThreadPoolExecutor(limits.max_active, thread_name_prefix="sbkit-request")
        self._short_tasks = ThreadPoolExecutor(limits.max_active, thread_name_prefix="sbkit-short")
        self.client_share = limits.client_share
        self.queue = FairQueue(limits.max_active, limits.client_share)
        self._shares = Shares(limits.max_requests, limits.client_share)
        self._mean = 1.0
        self.mean_work = 0.0
        """Seconds that a request takes in its thread."""

    @property
    def active(self) -> int:
        return self._shares.active

    @contextlib.contextmanager
    def slot(self, client: str | None = None) -> Iterator[None]:
        """Hold a slot for one request of a client; raises ``ApiError`` 429 if there is none."""
        wait = self._mean * self.active / self._limits.max_active
        with self._shares.slot(client, "requests running or waiting", wait):
            began = time.monotonic()
            try:
                yield
            finally:
                self._mean += _SMOOTH * (time.monotonic() - began - self._mean)

    def context(self, request: Request) -> RequestContext:
        """Start processing a request; its clock starts now."""
        return RequestContext(request, self, self._limits.request_seconds, self._metrics)

    def start(self, call: Callable[[], T], client: str | None) -> Future[T]:
        """Start a call in a thread, for a client who has a slot in :attr:`queue`; its end releases the slot."""
        began = time.monotonic()

        def ended(done: Future[T]) -> None:
            seconds = time.monotonic() - began
            if seconds > self.mean_work or not (done.cancelled() or done.exception()):  # else it failed early
                self.mean_work += _SMOOTH * (seconds - self.mean_work)
            self.queue.release(client)

        running = self._threads.submit(call)
        running.add_done_callback(ended)
        return running

    async def run_in_thread(self, call: Callable[..., T], *values: Any) -> T:
        """Run a call of milliseconds in a thread for such calls alone."""
        return await asyncio.get_running_loop().run_in_executor(self._short_tasks, call, *values)

    def close(self) -> None:
        for threads in (self._threads, self._short_tasks):
            threads.shutdown(wait=False, cancel_futures=True)


class RequestContext:
    """One request with its job, its deadline and its client's connection."""

    def __init__(self, request: Request, slots: RequestSlots, seconds: float, metrics: Metrics):
        self.job = Job(address(request.scope))
        self._request, self._slots, self._metrics = request, slots, metrics
        self._seconds, self.until = seconds, time.monotonic() + seconds
        self._disconnected: asyncio.Task[None] | None = None
        self._works: dict[Backlog, Work] = {}
        self.run_in_thread = slots.run_in_thread

    async def read(self, reading: Awaitable[T]) -> T:
        """Wait for the upload, within the deadline."""
        try:
            return await asyncio.wait_for(reading, max(self.until - time.monotonic(), 0.0))
        except (asyncio.TimeoutError, TimeoutError):
            self._metrics.cancelled.labels("slow upload").inc()
            for backlog, work in self._works.items():
                if work.remaining:
                    backlog.record_late_upload()
            raise too_slow(f"took longer than {self._seconds:g} s") from None

    def work(self, backlog: Backlog) -> Work:
        """The work of this request for a model, empty at first; this context closes it."""
        if backlog not in self._works:
            self._works[backlog] = Work(backlog, self.job.client, self._slots.client_share, self._seconds, self.until)
        return self._works[backlog]

    def expect(self, backlogs: Sequence[Backlog], size: int) -> None:
        """Hold room for an upload before it is read; raises ``ApiError`` 429 if no model has any.

        backlogs : of the models that the request may be for, which its body says
        size : bytes that the client is going to send; 0: unknown
        """
        errors: list[ApiError] = []
        for backlog in backlogs:
            try:
                self.work(backlog).expect(size)
            except ApiError as error:
                errors.append(error)
            finally:
                if len(backlogs) > 1:  # room in a model that isn't asked would be missing to others
                    self.work(backlog).close()
        if errors and len(errors) == len(backlogs):
            raise errors[0]

    async def stream(self, call: Callable[[Callable[[Any], None]], T], backlog: Backlog) -> AsyncIterator[Any]:
        """Yield what a call in a thread reports, then its result. Ends early, together with the call, at the deadline
        or when the client disconnects.

        backlog : of the model that the call runs
        """
        loop = asyncio.get_running_loop()
        results: asyncio.Queue[Any] = asyncio.Queue()

        def put(each: object) -> None:
            loop.call_soon_threadsafe(results.put_nowait, each)

        client, slots, work = self.job.client, self._slots, self.work(backlog)
        granted = slots.queue.acquire(client)  # this client's turn
        try:
            turn = asyncio.wrap_future(self.job.watch(granted))
            while not granted.done():  # how long those before it take may be known only once they run
                work.check()
                wait = slots.mean_work * slots.queue.ahead(client, granted)
                if wait + time.monotonic() > self.until:
                    raise busy("your address has as many waiting requests as can start within the time limit", wait)
                await self.wait_for(asyncio.wait({turn}, timeout=_POLL_SECONDS))
            await self.wait_for(turn)
            started = slots.start(lambda: call(put), client)  # its slot is free when the thread is
        except BaseException:
            if not granted.cancel():
                slots.queue.release(client)
            raise
        running = asyncio.wrap_future(self.job.watch(started))
        running.add_done_callback(results.put_nowait)  # the future itself, after all reports
        try:
            while (each := await self.wait_for(results.get())) is not running:
                yield each
            yield await self.wait_for(running)
        finally:
            self.job.cancel()
            running.cancel()

    async def wait_for(self, wanted: Awaitable[T]) -> T:
        """Wait for something, within the deadline and while the client is connected."""
        wanted = asyncio.ensure_future(wanted)
        if self._disconnected is None:
            self._disconnected = asyncio.create_task(_until_disconnected(self._request))
        try:
            await asyncio.wait({wanted, self._disconnected}, timeout=max(self.until - time.monotonic(), 0.0),
                               return_when=asyncio.FIRST_COMPLETED)
            if wanted.done():
                return wanted.result()
            disconnected = self._disconnected.done()
            self._metrics.cancelled.labels("client left" if disconnected else "deadline").inc()
            raise ClientDisconnected if disconnected else too_late(self._seconds)
        except (Cancelled, asyncio.CancelledError):
            raise ClientDisconnected from None
        finally:
            if not wanted.done():
                self.job.cancel()
                wanted.cancel()

    def close(self) -> None:
        self.job.cancel()
        for work in self._works.values():
            work.close()
        if self._disconnected is not None:
            self._disconnected.cancel()


async def _until_disconnected(request: Request) -> None:
    """Wait until the client disconnects: after the body, the next message is the end."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
