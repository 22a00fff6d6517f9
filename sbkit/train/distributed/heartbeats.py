"""Heartbeats of ranks in the store: a rank that stops answering is named, instead of waiting for it in silence."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: A rank that hasn't answered for so long is named.
SILENT_SECONDS = 60.0
_PACKAGE = Path(__file__).parents[2]


class Heartbeats:
    """Counts of this rank's heartbeats and of those it looks at: rank 0 looks at all others, rank 1 at rank 0.

    One thread exchanges them through the store. Another one compares times, since a store that is held by a stopped
    rank doesn't answer either.
    """

    _KEY = "sbkit/heartbeats"

    def __init__(self, rank: int, world: int, over: threading.Event):
        self.rank, self.over = rank, over
        self.watched = range(1, world) if rank == 0 else range(1) if rank == 1 else range(0)
        self._interval = SILENT_SECONDS / 12
        self._due = 0.0
        self._seen: dict[int, tuple[int, float]] = {}
        self._who: dict[int, str] = {}
        self._named: set[int] = set()
        if self.watched:
            threading.Thread(target=self._compare, name="heartbeats", daemon=True).start()

    def beat(self, store: Any) -> None:  # torch's stub of dist.Store lets set take no bytes
        """Count a heartbeat of this rank, and look at the others', if it is time."""
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
                if other not in self._who and store.check([key := f"{self._KEY}/{other}/who"]):
                    self._who[other] = store.get(key).decode()
                self._seen[other] = count, time.monotonic()

    @classmethod
    def end(cls, store: Any, rank: int) -> None:  # as above
        """Say that this rank leaves, and that nobody is to wait for its heartbeats."""
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
                    if other in self._named:
                        self._named.remove(other)
                        logger.warning("Rank %d answers again.", other)
                elif other not in self._named:
                    self._named.add(other)
                    logger.warning(
                        "Rank %d (%s) has not answered for %.0f s, and all others wait for it (rank %d in %s). Is that "
                        "process stopped, or its machine gone or short of memory?",
                        other, self._who.get(other, "unknown process"), now - when, self.rank, _main_thread_is_in())


def _main_thread_is_in() -> str:
    """Return the function of sbkit that the main thread is in, besides the exchange between ranks itself."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE) and path.parent != Path(__file__).parent:
            return f"{frame.f_code.co_name}, {path.relative_to(_PACKAGE.parent)}:{frame.f_lineno}"
        frame = frame.f_back
    return "code outside sbkit"
