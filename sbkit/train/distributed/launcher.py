"""The end of a process when its launcher is gone: workers of a killed torchrun would train on unnoticed."""

from __future__ import annotations

import logging
import os
import threading
import time

from sbkit.train.distributed import ending

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
#: Seconds for a checkpoint that is being written, and for a run that is already stopping.
_WRITING_SECONDS, _STOPPING_SECONDS = 5.0, 30.0
_CODE = 1

#: Read at import, before slow imports, while the launcher is still the parent.
_parent = os.getppid()
_watching = False
_stopping = threading.Event()
_leaving = threading.Lock()


def watch() -> None:
    """End this process soon after torchrun ends, if torchrun started it.

    A thread polls the parent process. The kernel's signal of a parent's death is sent when the *thread* that started a
    process ends, and does not help a main thread that waits in a collective.
    """
    global _watching
    if "TORCHELASTIC_RUN_ID" in os.environ and not _watching:
        _watching = True
        threading.Thread(target=_watch, name="launcher", daemon=True).start()


def stopping() -> None:
    """Allow this process time to save after a stop signal, which may have ended torchrun, too."""
    _stopping.set()


def leave_if_gone() -> None:
    """End this process if torchrun is gone; any other error is then a consequence."""
    if _watching and os.getppid() != _parent:
        leave(f"torchrun (process {_parent}), which started this process, is gone, so this process ends; run the same "
              "command to resume from the last checkpoint")


def leave(reason: str) -> None:
    """Log the reason and end this process within seconds, leaving time for a checkpoint that is being written."""
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()  # until the thread that came first ends the process
    late = threading.Timer(_WRITING_SECONDS + 1, os._exit, (_CODE,))  # in case the log's disk or terminal blocks
    late.daemon = True
    late.start()
    logger.error(reason)
    ending.now(_CODE, _WRITING_SECONDS)


def _watch() -> None:
    while os.getppid() == _parent:
        time.sleep(_POLL_SECONDS)
    if _stopping.is_set():
        time.sleep(_STOPPING_SECONDS)
    leave_if_gone()


def _start_afresh() -> None:
    global _parent, _watching
    _parent, _watching = os.getppid(), False


os.register_at_fork(after_in_child=_start_afresh)
