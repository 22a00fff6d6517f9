"""The end of a process of a failed run: at once, after its output and a checkpoint in progress are written.

A collective that a failed rank never joins can't be cancelled, and leaving its process group waits for it: with NCCL,
half an hour. So such a process skips Python's normal shutdown.
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

# Time limit for a checkpoint that is being written.
_WRITING_SECONDS = 120.0

_writing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_due: tuple[int, int] | None = None  # the process and its exit code


def let_finish(thread: threading.Thread) -> None:
    """Wait for this thread at the end of the process, whatever ends it."""
    _writing.add(thread)


def due(code: int) -> None:
    """End this process by ``now``, with this exit code, after its messages and exit functions."""
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
    """Return whether ``due`` was called in this process."""
    return _due is not None and _due[0] == os.getpid()


def finish_writing(patience: float = _WRITING_SECONDS) -> None:
    """Wait until nothing is being written, for at most ``patience`` seconds."""
    until = time.monotonic() + patience
    for thread in list(_writing):
        thread.join(max(0.0, until - time.monotonic()))


def now(code: int, patience: float = _WRITING_SECONDS) -> None:
    """End this process and its workers at once."""
    finish_writing(patience)
    for child in multiprocessing.active_children():
        child.kill()  # data workers ignore a SIGTERM
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    logging.shutdown()
    os._exit(code)


def _at_exit() -> None:
    if _due is not None and is_due():
        now(_due[1])


# Registered at import, it runs after all functions that scripts and loggers register later.
atexit.register(_at_exit)
