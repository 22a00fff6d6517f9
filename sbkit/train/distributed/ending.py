"""The end of a process whose run has failed: what was said and saved stands, and nothing else is waited for.

A collective that a failed rank never joins can't be called off, and leaving its group waits for it: with NCCL half an
hour. So such a process does not end as Python's do, by taking everything down in order, but at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref

# A checkpoint that is being written has this long to appear.
_WRITING_SECONDS = 120.0

_writing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_due: tuple[int, int] | None = None  # the process and its exit code


def let_finish(thread: threading.Thread) -> None:
    """Give a thread time to end its work, whatever ends the process."""
    _writing.add(thread)


def due(code: int) -> None:
    """From here on, the end of this process is the one below: its message said, its exit functions run."""
    global _due
    if _due is None:
        _due = os.getpid(), code


def code_of(error: BaseException) -> int:
    """Return the exit code of a process that this error ends."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)
    return code if isinstance(code, int) else 1


def is_due() -> bool:
    return _due is not None and _due[0] == os.getpid()


def finish_writing(patience: float = _WRITING_SECONDS) -> None:
    """Wait until nothing is being written, or so many seconds."""
    until = time.monotonic() + patience
    for thread in list(_writing):
        thread.join(max(0.0, until - time.monotonic()))


def now(code: int, patience: float = _WRITING_SECONDS) -> None:
    """End this process and its workers."""
    finish_writing(patience)
    for child in multiprocessing.active_children():
        child.kill()  # data workers don't listen to less
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    logging.shutdown()
    os._exit(code)


def _at_exit() -> None:
    if _due is not None and is_due():
        now(_due[1])


# Registered when this is imported, it runs after what scripts and loggers register later.
atexit.register(_at_exit)
