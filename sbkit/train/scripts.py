"""What ``sbkit train`` adds to a run, for scripts with ``sbkit.Brain``: a lock on the folder, a message at the end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from speechbrain.utils.checkpoints import Checkpointer

from sbkit.data.lock import Lock
from sbkit.errors import SbkitError
from sbkit.train.distributed import ranks
from sbkit.train.keys import ScriptKeys, TrainKeys

logger = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds: a process that was just stopped may still be saving


@contextlib.contextmanager
def lock_checkpoints(keys: TrainKeys, checkpointer: Checkpointer | None) -> Iterator[None]:
    """Lock the folder of a script's checkpoints while it trains."""
    with contextlib.ExitStack() as stack:
        if checkpointer is not None and isinstance(keys, ScriptKeys) and ranks.is_main():
            _acquire(stack, Path(checkpointer.checkpoints_dir))
        yield


def _acquire(stack: contextlib.ExitStack, folder: Path) -> None:
    lock, until = stack.enter_context(Lock(folder)), time.monotonic() + _PATIENCE
    while lock.acquire() is False:
        if time.monotonic() > until:
            raise SbkitError(f"another process is training with the checkpoints in {folder}",
                             hint="wait until it ends, or choose another folder for this one")
        time.sleep(0.1)


def log_stop(keys: TrainKeys, stopped: Exception) -> None:
    """Log what stopped a script, because Python prints nothing."""
    if isinstance(keys, ScriptKeys) and ranks.is_main():
        logger.warning("%s", stopped)
