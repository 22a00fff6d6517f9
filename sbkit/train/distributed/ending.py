"""Ends a process at once, after pending writes, without Python's normal shutdown.

A collective that a failed rank never joins can't be cancelled, and leaving its process group waits for it: with NCCL,
half an hour. So a process of a failed run ends by ``os._exit``, in one of three ways:

- ``schedule_exit``: once its messages are out and all other functions registered at exit have run;
- ``exit_now``: at once, called by a thread while the main thread is stuck;
- ``exit_with_error``: likewise, with a message, and within seconds even if the log can't be written.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
import weakref

logger = logging.getLogger(__name__)

# Time limit for a checkpoint that is being written.
_WRITING_SECONDS = 120.0
# The same after ``exit_with_error``, when the run's folder may belong to another run.
_LEAVING_SECONDS = 5.0

#: Threads that the end of the process waits for, even after an error.
writing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_scheduled_code: int | None = None  # None: no exit is scheduled
_leaving = threading.Lock()  # held by the thread that ends the process with an error


def schedule_exit(code: int) -> None:
    """End this process by ``exit_now``, after its messages and exit functions; the first code that is given counts."""
    global _scheduled_code
    if _scheduled_code is None:
        _scheduled_code = code


def exit_is_scheduled() -> bool:
    """Return whether ``schedule_exit`` was called in this process."""
    return _scheduled_code is not None


def finish_writing(patience: float = _WRITING_SECONDS) -> None:
    """Wait until nothing is being written, for at most ``patience`` seconds."""
    until = time.monotonic() + patience
    for thread in list(writing):
        thread.join(max(0.0, until - time.monotonic()))


def exit_now(code: int, patience: float = _WRITING_SECONDS) -> None:
    """End this process and its workers at once."""
    finish_writing(patience)
    for child in multiprocessing.active_children():
        child.kill()  # data workers ignore a SIGTERM
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    logging.shutdown()
    os._exit(code)


def exit_with_error(code: str, reason: str) -> None:
    """Log the reason with its code, and end this process within seconds, after a checkpoint that is being written."""
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()  # another thread is already ending the process
    late = threading.Timer(_LEAVING_SECONDS + 1, os._exit, (1,))  # in case the log's disk or terminal blocks
    late.daemon = True
    late.start()
    logger.error("%s [%s]", reason, code)
    exit_now(1, _LEAVING_SECONDS)


def _at_exit() -> None:
    if _scheduled_code is not None:
        exit_now(_scheduled_code)


# Registered at import, it runs after all functions that scripts and loggers register later.
atexit.register(_at_exit)


def _start_afresh() -> None:
    global _scheduled_code
    _scheduled_code = None


os.register_at_fork(after_in_child=_start_afresh)
