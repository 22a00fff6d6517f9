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
import platform
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: Seconds without a heartbeat after which a rank is reported.
SILENT_SECONDS = 60.0
_PACKAGE = Path(__file__).parents[2]


class Heartbeats:
    """Counts of the heartbeats of this rank and of those that it watches: rank 0 watches all others, rank 1 rank 0.

    One thread exchanges them through the store. Another one compares times, since the store itself doesn't respond if
    the rank that holds it is stopped.
    """

    _KEY = "sbkit/heartbeats"

    def __init__(self, rank: int, world: int, over: threading.Event):
        self.rank, self.over = rank, over
        self.watched = range(1, world) if rank == 0 else range(1) if rank == 1 else range(0)
        self._interval = SILENT_SECONDS / 12
        self._due = 0.0
        self._seen: dict[int, tuple[int, float]] = {}
        self._processes: dict[int, str] = {}
        self._reported: set[int] = set()
        if self.watched:
            threading.Thread(target=self._compare, name="heartbeats", daemon=True).start()

    def beat(self, store: Any) -> None:  # torch's stub of dist.Store lets set take no bytes
        """Count a heartbeat of this rank and read the others', if it is time."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._interval
        if store.add(f"{self._KEY}/{self.rank}", 1) == 1:
            store.set(f"{self._KEY}/{self.rank}/who", f"host {platform.node()}, process {os.getpid()}")
        for other in self.watched:
            count = store.add(f"{self._KEY}/{other}", 0)
            if store.check([f"{self._KEY}/{other}/end"]):
                self._seen.pop(other, None)
            elif count and count != self._seen.get(other, (0, 0.0))[0]:
                if other not in self._processes and store.check([key := f"{self._KEY}/{other}/who"]):
                    self._processes[other] = store.get(key).decode()
                self._seen[other] = count, time.monotonic()

    @classmethod
    def end(cls, store: Any, rank: int) -> None:  # as above
        """Announce that this rank leaves and sends no more heartbeats."""
        store.set(f"{cls._KEY}/{rank}/end", b"1")

    def _compare(self) -> None:
        before = time.monotonic()
        while not self.over.wait(self._interval / 5):
            now = time.monotonic()
            if now - before > self._interval:  # this process was stopped itself
                self._seen = {other: (count, now) for other, (count, _) in self._seen.items()}
            before = now
            for other, (_, when) in list(self._seen.items()):
                if now - when <= SILENT_SECONDS:
                    if other in self._reported:
                        self._reported.remove(other)
                        logger.warning("Rank %d responds again.", other)
                elif other not in self._reported:
                    self._reported.add(other)
                    logger.warning(
                        "Rank %d (%s) has not responded for %.0f s, and all others wait for it (rank %d in %s). Is "
                        "that process stopped, or its machine down or short of memory?",
                        other, self._processes.get(other, "unknown process"), now - when, self.rank,
                        _main_thread_location())


def _main_thread_location() -> str:
    """Return the function of sbkit outside this folder in which the main thread is, with its file and line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE) and path.parent != Path(__file__).parent:
            return f"{frame.f_code.co_name}, {path.relative_to(_PACKAGE.parent)}:{frame.f_lineno}"
        frame = frame.f_back
    return "code outside sbkit"


# Time limit for a checkpoint that is being written.
_WRITING_SECONDS = 120.0

_writing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_exit_code: int | None = None  # of the exit that is scheduled


def let_finish(thread: threading.Thread) -> None:
    """Wait for this thread at the end of the process, even after an error."""
    _writing.add(thread)


def schedule_exit(code: int) -> None:
    """End this process by ``exit_now``, with this exit code, after its messages and exit functions."""
    global _exit_code
    if _exit_code is None:
        _exit_code = code


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that this error ends."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)
    return code if isinstance(code, int) else 1


def exit_is_scheduled() -> bool:
    """Return whether ``schedule_exit`` was called in this process."""
    return _exit_code is not None


def finish_writing(patience: float = _WRITING_SECONDS) -> None:
    """Wait until nothing is being written, for at most ``patience`` seconds."""
    until = time.monotonic() + patience
    for thread in list(_writing):
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
_stopping = threading.Event()
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


def allow_time_to_save() -> None:
    """Allow this process time to save after a stop signal, which may have ended torchrun, too."""
    _stopping.set()


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
    if _stopping.is_set():
        time.sleep(_STOPPING_SECONDS)
    exit_if_orphaned()


def _start_afresh() -> None:
    global _exit_code, _parent, _watching
    _exit_code, _parent, _watching = None, os.getppid(), False


os.register_at_fork(after_in_child=_start_afresh)
