"""A thread to go on in, where libraries are stuck in this one since memory ran out."""

from __future__ import annotations

import functools
import queue
from _thread import start_new_thread
from collections.abc import Callable
from typing import Any

import torch

from sbkit.errors import SbkitError
from sbkit.train.memory import host

#: How oneDNN says that there was no room for the code which it compiles for a shape (or something else).
NO_PRIMITIVE = "could not create a primitive"
#: Seconds in which a thread begins, however busy the machine is.
_PATIENCE = 60.0


class _Worker:
    """A thread that calls functions one after the other.

    None of ``threading``'s, whose start waits for ever for a thread that dies before it begins, as it does where no
    memory is left.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            start_new_thread(self._work, ())
            self._answers.get(timeout=_PATIENCE)
        except (RuntimeError, MemoryError, queue.Empty) as error:
            raise SbkitError("out of memory: not even a thread has room to start", hint="raise the bound that this "
                             "process has (ulimit -d, ulimit -v)", exit_code=1) from error

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._asked.put((torch.is_grad_enabled(), function, args, kwargs))
        result, error = self._answers.get()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # with this frame it would keep what its frames hold

    def end(self) -> None:
        self._asked.put(None)

    def _work(self) -> None:
        self._answers.put(None)  # it lives
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
            del asked, function, args, kwargs, answer  # nothing stays until the next one comes


class Threads:
    """Calls functions in this thread, or in a new one once libraries are stuck in it.

    oneDNN keeps, for each thread, the first failure to get room for compiled code, and refuses every new shape in that
    thread from then on. The next thread starts while there is room for its stack.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._spare: _Worker | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.reached(function)(*args, **kwargs)

    def reached(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as it is to be called: itself, or in another thread."""
        if self._spare is None and host.bounded():
            self._spare = _Worker()
        return function if self._worker is None else functools.partial(self._worker, function)

    def leave_if_stuck(self, error: BaseException) -> None:
        """Call functions in another thread from now on, where this error needs it."""
        if NO_PRIMITIVE in str(error):
            if self._worker is not None:
                self._worker.end()
            self._worker, self._spare = self._spare, None
