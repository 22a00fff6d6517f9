"""One request: its deadline, its client's connection, its thread, and its share of the models' work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from sbkit.serve.backlog import Backlog, Work
from sbkit.serve.clients import address
from sbkit.serve.errors import ApiError, busy, too_late, too_slow
from sbkit.serve.job import Cancelled, Job
from sbkit.serve.metrics import Metrics
from sbkit.serve.request_slots import RequestSlots

T = TypeVar("T")
_POLL_SECONDS = 0.5  # between checks whether a turn can still come in time


class ClientDisconnected(Exception):
    """The client disconnected."""


class RequestContext:
    """One request with its job, its deadline and its client's connection. Its clock starts when it is made.

    slots : one of them is held for this request
    """

    def __init__(self, request: Request, slots: RequestSlots, metrics: Metrics):
        self.job = Job(address(request.scope))
        self.run_in_thread = slots.run_in_thread
        self._request = request
        self._slots = slots
        self._metrics = metrics
        self._seconds = slots.limits.request_seconds
        self._deadline = time.monotonic() + self._seconds
        self._disconnected: asyncio.Task[None] | None = None  # ends when the client disconnects
        self._works: dict[Backlog, Work] = {}

    async def read(self, reading: Awaitable[T]) -> T:
        """Wait for the upload, within the deadline."""
        try:
            return await asyncio.wait_for(reading, self._seconds_left())
        except (asyncio.TimeoutError, TimeoutError):
            self._metrics.cancelled.labels("slow upload").inc()
            for backlog, work in self._works.items():
                if work.remaining:
                    backlog.record_late_upload()
            raise too_slow(f"took longer than {self._seconds:g} s") from None

    def work(self, backlog: Backlog) -> Work:
        """The work of this request for a model, empty at first; this context closes it."""
        if backlog not in self._works:
            self._works[backlog] = Work(
                backlog, self.job.client, self._slots.limits.client_share, self._seconds, self._deadline)
        return self._works[backlog]

    def expect(self, backlogs: Sequence[Backlog], size: int) -> None:
        """Hold room for an upload before it is read; raises ``ApiError`` 429 if no model has any.

        backlogs : of the models that the request may be for; only its body names one
        size : bytes that the client is going to send; 0: unknown
        """
        errors: list[ApiError] = []
        for backlog in backlogs:
            try:
                self.work(backlog).expect(size)
            except ApiError as error:
                errors.append(error)
            finally:
                # Room in a model that the request turns out not to be for would be missing to others.
                if len(backlogs) > 1:
                    self.work(backlog).close()
        if errors and len(errors) == len(backlogs):
            raise errors[0]

    async def stream(self, call: Callable[[Callable[[Any], None]], T], backlog: Backlog) -> AsyncIterator[Any]:
        """Run a call in a thread; yield what it reports, then its result. Ends early, together with the call, at the
        deadline or when the client disconnects.

        call : takes a function that reports a value
        backlog : of the model that the call runs
        """
        loop = asyncio.get_running_loop()
        reports: asyncio.Queue[Any] = asyncio.Queue()

        def report(value: object) -> None:
            loop.call_soon_threadsafe(reports.put_nowait, value)

        running = await self._start(lambda: call(report), backlog)
        running.add_done_callback(reports.put_nowait)  # the future itself marks the end of all reports
        try:
            while True:
                value = await self.wait_for(reports.get())
                if value is running:
                    break
                yield value
            yield await self.wait_for(running)
        finally:
            self.job.cancel()
            running.cancel()

    async def _start(self, call: Callable[[], T], backlog: Backlog) -> asyncio.Future[T]:
        """Wait for this client's turn, and start a call in a thread; raises ``ApiError`` if it can't end in time."""
        client = self.job.client
        queue = self._slots.queue
        work = self.work(backlog)
        turn = queue.acquire(client)
        try:
            waiting = asyncio.wrap_future(self.job.watch(turn))
            while not turn.done():  # how long the requests before it take may be known only once they run
                work.check()
                seconds = self._slots.average_thread_seconds * queue.ahead(client, turn)
                if seconds + time.monotonic() > self._deadline:
                    raise busy("your address has as many waiting requests as can start within the time limit", seconds)
                await self.wait_for(asyncio.wait({waiting}, timeout=_POLL_SECONDS))
            await self.wait_for(waiting)
            running = self._slots.start(call, client)  # its end releases the slot
        except BaseException:
            if not turn.cancel():
                queue.release(client)
            raise
        return asyncio.wrap_future(self.job.watch(running))

    async def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Wait for something, within the deadline and while the client is connected."""
        future = asyncio.ensure_future(awaitable)
        if self._disconnected is None:
            self._disconnected = asyncio.create_task(_until_disconnected(self._request))
        try:
            await asyncio.wait({future, self._disconnected}, timeout=self._seconds_left(),
                               return_when=asyncio.FIRST_COMPLETED)
            if future.done():
                return future.result()
            if self._disconnected.done():
                self._metrics.cancelled.labels("client left").inc()
                raise ClientDisconnected
            self._metrics.cancelled.labels("deadline").inc()
            raise too_late(self._seconds)
        except (Cancelled, asyncio.CancelledError):
            raise ClientDisconnected from None
        finally:
            if not future.done():
                self.job.cancel()
                future.cancel()

    def close(self) -> None:
        self.job.cancel()
        for work in self._works.values():
            work.close()
        if self._disconnected is not None:
            self._disconnected.cancel()

    def _seconds_left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)


async def _until_disconnected(request: Request) -> None:
    """Wait until the client disconnects: after the body, the next message is the end."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
