"""Ends a process at once, after pending writes, if its run has failed or its launcher is gone.

A collective that a failed rank never joins can't be cancelled, and leaving its process group waits for it: with NCCL,
half an hour. So such a process skips Python's normal shutdown. Workers of a killed torchrun, which would train on
unnoticed, end themselves.
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

#: Threads that the end of the process waits for, even after an error.
writing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_exit_code: int | None = None  # of the exit that is scheduled


def schedule_exit(code: int) -> None:
    """End this process by ``exit_now``, with this exit code, after its messages and exit functions."""
    global _exit_code
    if _exit_code is None:
        _exit_code = code


def exit_is_scheduled() -> bool:
    """Return whether ``schedule_exit`` was called in this process."""
    return _exit_code is not None


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


def _at_exit() -> None:
    if _exit_code is not None:
        exit_now(_exit_code)


# Registered at import, it runs after all functions that scripts and loggers register later.
atexit.register(_at_exit)


# ------------------------------------------------------------ a launcher that is gone

#: Seconds between checks whether torchrun is running.
POLL_SECONDS = 1.0
#: Seconds for a checkpoint that is being written, and for a run that is already stopping.
_LEAVING_SECONDS, _STOPPING_SECONDS = 5.0, 30.0

#: Read at import, before slow imports, while the launcher is still the parent.
_parent = os.getppid()
_watching = False
#: Set after a stop signal, which may have ended torchrun, too: this process then gets time to save.
stopping = threading.Event()
_leaving = threading.Lock()


def watch_launcher() -> None:
    """End this process soon after torchrun ends, if torchrun started it.

    A thread polls the parent process. The kernel's signal of a parent's death is sent when the *thread* that started a
    process ends, and does not help a main thread that waits in a collective.
    """
    global _watching
    if "TORCHELASTIC_RUN_ID" in os.environ and not _watching:
        _watching = True
        threading.Thread(target=_watch, name="launcher", daemon=True).start()


def exit_if_orphaned() -> None:
    """End this process if torchrun is gone; any other error is then a consequence."""
    if _watching and os.getppid() != _parent:
        exit_with_error(f"torchrun (process {_parent}), which started this process, is gone, so this process ends; run "
                        "the same command to resume from the last checkpoint")


def exit_with_error(reason: str) -> None:
    """Log the reason and end this process within seconds, leaving time for a checkpoint that is being written."""
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()  # another thread is already ending the process
    late = threading.Timer(_LEAVING_SECONDS + 1, os._exit, (1,))  # in case the log's disk or terminal blocks
    late.daemon = True
    late.start()
    logger.error(reason)
    exit_now(1, _LEAVING_SECONDS)


def _watch() -> None:
    while os.getppid() == _parent:
        time.sleep(POLL_SECONDS)
    if stopping.is_set():
        time.sleep(_STOPPING_SECONDS)
    exit_if_orphaned()


def _start_afresh() -> None:
    global _exit_code, _parent, _watching
    _exit_code, _parent, _watching = None, os.getppid(), False


os.register_at_fork(after_in_child=_start_afresh)
