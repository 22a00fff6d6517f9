"""Ends this process if the torchrun that started it is gone: its workers would train on unnoticed.

``watch_launcher`` starts a thread that polls the parent process. The kernel's signal of a parent's death is no help: it
is sent when the *thread* that started a process ends, and doesn't reach a main thread that waits in a collective.
"""

from __future__ import annotations

import os
import threading
import time

from sbkit.train.distributed import ending

#: Seconds between checks whether torchrun is running.
POLL_SECONDS = 1.0
#: Time for a run that is already stopping, as what stopped it may have ended torchrun, too.
_STOPPING_SECONDS = 30.0

#: Set after a stop signal: this process then gets time to save.
stopping = threading.Event()


class _Launcher:
    """The process that started this one, read at import, before slow imports, while it is still the parent."""

    def __init__(self) -> None:
        self.pid = os.getppid()
        self.is_watched = False

    @property
    def is_gone(self) -> bool:
        return os.getppid() != self.pid


_launcher = _Launcher()


def watch_launcher() -> None:
    """End this process soon after torchrun ends, if torchrun started it."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not _launcher.is_watched:
        _launcher.is_watched = True
        threading.Thread(target=_watch, name="launcher", daemon=True).start()


def exit_if_orphaned() -> None:
    """End this process if torchrun is gone; any other error is then a consequence."""
    if _launcher.is_watched and _launcher.is_gone:
        ending.exit_with_error(f"torchrun (process {_launcher.pid}), which started this process, is gone, so this "
                               "process ends; run the same command to resume from the last checkpoint")


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
