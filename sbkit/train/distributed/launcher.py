"""The end of a process whose launcher is gone: workers of a killed torchrun would train on for ever, unseen."""

from __future__ import annotations

import logging
import os
import threading
import time

from sbkit.train.distributed import ending

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
#: Seconds for a checkpoint that is being written, and for a run that was told to stop and is at it.
_WRITING_SECONDS, _STOPPING_SECONDS = 5.0, 30.0
_CODE = 1

#: As soon as this is imported, so that it is the launcher's, however long other imports take.
_parent = os.getppid()
_watching = False
_stopping = threading.Event()
_leaving = threading.Lock()


def watch() -> None:
    """End this process soon after torchrun, if that started it. Those that a shell or another program started live on.

    A thread looks: the kernel's signal of a parent's death comes when the *thread* that started a process ends, and
    is no use to a main thread that waits in a collective.
    """
    global _watching
    if "TORCHELASTIC_RUN_ID" in os.environ and not _watching:
        _watching = True
        threading.Thread(target=_watch, name="launcher", daemon=True).start()


def stopping() -> None:
    """This process was told to stop and needs time to save: torchrun may have ended by the same signal."""
    _stopping.set()


def leave_if_gone() -> None:
    """End this process if torchrun is gone: what else goes wrong then comes of that."""
    if _watching and os.getppid() != _parent:
        leave(f"torchrun (process {_parent}), which started this process, is gone, so it ends here; the same command "
              "resumes from the last checkpoint")


def leave(reason: str) -> None:
    """End this process within seconds, wherever it is. A checkpoint that is being written appears, or never will."""
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()  # for the end, by the thread that was first
    late = threading.Timer(_WRITING_SECONDS + 1, os._exit, (_CODE,))  # should a log's disk or terminal hold it up
    late.daemon = True
    late.start()
    logger.error(reason)
    ending.now(_CODE, _WRITING_SECONDS)


def _watch() -> None:
    while os.getppid() == _parent:
        time.sleep(_LOOK_SECONDS)
    if _stopping.is_set():
        time.sleep(_STOPPING_SECONDS)
    leave_if_gone()


def _start_afresh() -> None:
    global _parent, _watching
    _parent, _watching = os.getppid(), False


os.register_at_fork(after_in_child=_start_afresh)
