"""The one thread that owns a model: imports, compilation, warm-up and runs all happen there.

torch 2.11 keeps the state of CUDA graphs in the thread that first imports ``torch._inductor.cudagraph_trees``; a
model compiled in one thread and run in another finds none. A single thread for everything avoids this, and the same
problem with any other library's per-thread state.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Worker:
    """Runs calls one after another in its own thread; any thread may submit them."""

    def __init__(self, name: str = "sbkit-model"):
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self.thread.start()
        self._stop = weakref.finalize(self, self._jobs.put, None)  # also if nobody called close()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a call. A future that is cancelled before its turn is skipped."""
        if not self._stop.alive:
            raise RuntimeError("the model was closed")
        future: Future[Any] = Future()
        self._jobs.put((future, call, args))
        return future

    def inside(self) -> bool:
        """Whether the calling thread is the one that owns the model."""
        return threading.current_thread() is self.thread

    def close(self) -> None:
        """End the thread after the queued calls; further calls are refused."""
        self._stop()
        if not self.inside():
            self.thread.join()


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, call, args = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)
        del job, future, call, args  # otherwise the last call stays in memory until the next one
    while not jobs.empty():
        late = jobs.get()
        if late is not None:
            late[0].cancel()
