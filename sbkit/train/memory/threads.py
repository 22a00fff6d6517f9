"""Replacement of a thread in which a library is stuck since memory ran out."""

from __future__ import annotations

import functools
import queue
from _thread import start_new_thread
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from sbkit.errors import SbkitError
from sbkit.train.memory import host

T = TypeVar("T")
#: oneDNN's message when there was no memory for compiled code (or another failure).
NO_PRIMITIVE = "could not create a primitive"
#: Time limit in seconds for the start of a thread on a busy machine.
_PATIENCE = 60.0


class _Worker:
    """A thread that calls functions for others, one after the other.

    It does not use ``threading``, whose ``start`` waits forever for a thread that dies before it begins, as happens
    without memory.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            start_new_thread(self._work, ())
            self._answers.get(timeout=_PATIENCE)
        except (RuntimeError, MemoryError, queue.Empty) as error:
            raise SbkitError("out of memory: there is none left to start a thread", hint=host.LIMIT_HINT,
                             exit_code=1) from error

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        self._asked.put((torch.is_grad_enabled(), function, args, kwargs))
        result, error = self._answers.get()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # otherwise error and frame would keep each other, and all tensors, alive

    def end(self) -> None:
        """End the thread after its present function."""
        self._asked.put(None)

    def _work(self) -> None:
        self._answers.put(None)  # the thread has started
        while True:
            asked = self._asked.get()
            if asked is None:
                return
            grad, function, args, kwargs = asked
            answer: tuple[Any, BaseException | None]
            try:
                with torch.set_grad_enabled(grad):  # each thread has its own
                    answer = function(*args, **kwargs), None
            except BaseException as error:
                answer = None, error
            self._answers.put(answer)
            del asked, function, args, kwargs, answer  # hold nothing while waiting


class Threads:
    """Calls functions in this thread, or in another one if a library is stuck in this thread.

    When oneDNN once fails to get memory for compiled code, it refuses every new shape in that thread from then on. The
    next thread is started in advance, while there is memory for its stack.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._spare: _Worker | None = None

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return self.reached(function)(*args, **kwargs)

    def reached(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return the function itself, or one that calls it in another thread."""
        if self._spare is None and host.bounded():
            self._spare = _Worker()
        return function if self._worker is None else functools.partial(self._worker, function)

    def leave_if_stuck(self, error: BaseException) -> None:
        """Use another thread from now on, if this error requires it."""
        if NO_PRIMITIVE in str(error):
            if self._worker is not None:
                self._worker.end()
            self._worker, self._spare = self._spare, None
