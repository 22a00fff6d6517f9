"""Ends this process if what started it is gone, torchrun or rank 0: it would train on unnoticed.

``watch_launcher`` starts a thread that looks for the process that started this one. The kernel's signal of a parent's
death is no help: it is sent when the *thread* that started a process ends, and doesn't reach a main thread that waits
in a collective.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
import time

from sbkit.train.distributed import ending

#: Seconds between checks whether it is running.
POLL_SECONDS = 1.0
#: Time for a run that is already stopping, as what stopped it may have ended torchrun, too.
_STOPPING_SECONDS = 30.0

#: Set after a stop signal: this process then gets time to save.
stopping = threading.Event()


class _Launcher:
    """The process that started this one: torchrun, or rank 0 of ranks that a run starts by itself (``local_ranks``)."""

    def __init__(self) -> None:
        self._parent = os.getppid()  # read at import, before slow imports, while it is still the parent
        self.is_rank_0 = False
        self.is_watched = False

    @property
    def is_gone(self) -> bool:
        if not self.is_rank_0:
            return os.getppid() != self._parent
        # Its end closes a pipe; this process's own parent is the server that forks processes.
        rank_0 = multiprocessing.parent_process()
        return rank_0 is not None and bool(multiprocessing.connection.wait([rank_0.sentinel], timeout=0))

    def __str__(self) -> str:
        return "rank 0" if self.is_rank_0 else f"torchrun (process {self._parent})"


_launcher = _Launcher()


def watch_launcher() -> None:
    """End this process soon after torchrun ends, if torchrun started it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _begin_to_watch()


def watch_rank_0() -> None:
    """End this process, which rank 0 has started by multiprocessing, soon after rank 0 ends."""
    _launcher.is_rank_0 = True
    _begin_to_watch()


def _begin_to_watch() -> None:
    if not _launcher.is_watched:
        _launcher.is_watched = True
        threading.Thread(target=_watch, name="launcher", daemon=True).start()


def exit_if_orphaned() -> None:
    """End this process if what started it is gone; any other error is then a consequence."""
    if _launcher.is_watched and _launcher.is_gone:
        ending.exit_with_error("lost-rank", f"{_launcher}, which started this process, is gone, so this process ends; "
                               "run the same command to resume from the last checkpoint")


def _watch() -> None:
    while not _launcher.is_gone:
        time.sleep(POLL_SECONDS)
    if stopping.is_set():
        time.sleep(_STOPPING_SECONDS)
    exit_if_orphaned()


def _start_afresh() -> None:
    global _launcher
    _launcher = _Launcher()


os.register_at_fork(after_in_child=_start_afresh)
