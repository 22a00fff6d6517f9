"""What a step waits for: how often the host waits for the GPU, and how long a CPU's threads wait for a core."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TextIO

import torch

from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

SKIPPED, COUNTED = 5, 100  # steps of an epoch to skip, and steps to count in then

_WAIT = r"called a synchronizing \w+ operation"
_NOTICE = "Synchronization debug mode is a prototype feature"  # by torch, when the mode is first set
# Without them each place is reported only once. They stay, and affect no other warning.
_FILTERS: tuple[tuple[Literal["always", "ignore"], str], ...] = (("always", _WAIT), ("ignore", _NOTICE))
_WARN = 1  # the value of ``torch.cuda.get_sync_debug_mode()``

THREADS = Path("/proc/self/task")
_MEASURE_AFTER = 20.0  # seconds of an epoch
_MIN_SECONDS = 2.0  # seconds, at the end of a shorter epoch
_WORTH_REPORTING = 0.15


class HostWaits:
    """A context that counts torch's warnings of host syncs, and hides them.

    Torch warns of reading values and of copies from memory that is not pinned, also in backward, but not of events and
    collectives. Counting causes no syncs. Nothing is counted without CUDA, or if ``torch.cuda.set_sync_debug_mode``
    was already set, which is then kept.
    """

    def __init__(self, device: torch.device):
        self._enabled = device.type == "cuda"
        self._thread = threading.get_ident()
        self._entered = self._counting = self._paused = False
        self.reset()

    def reset(self) -> None:
        """Discard all counts, at the start of an epoch."""
        self._steps = self._counted = 0
        self._places: Counter[tuple[str, int]] = Counter()

    def step(self) -> None:
        """Record the end of a step."""
        if not self._enabled or not self._entered:
            return
        self._steps += 1
        self._counted += self._counting
        if self._steps == SKIPPED and torch.cuda.get_sync_debug_mode() == 0:
            self._start()
        elif self._counted == COUNTED:
            self._stop()

    def __enter__(self) -> HostWaits:
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        self._stop()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Don't count inside this context."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def per_step(self) -> float | None:
        """Return the mean number of host syncs a step; None if no step was counted."""
        return self._places.total() / self._counted if self._counted else None

    def describe(self) -> str | None:
        """Describe the host syncs and where most of them are; None if no step was counted."""
        waits = self.per_step()
        if not waits:
            return None if waits is None else "host waits 0 a step"
        (file, line), _ = self._places.most_common(1)[0]
        return f"host waits {waits:.3g} a step, most of them at {'/'.join(Path(file).parts[-2:])}:{line}"

    def _start(self) -> None:
        there = {(action, getattr(message, "pattern", None)) for action, message, *_ in warnings.filters}
        for wanted in _FILTERS:
            if wanted not in there:  # each change makes Python show earlier warnings again
                warnings.filterwarnings(*wanted)
        self._shown, warnings.showwarning = warnings.showwarning, self._show
        torch.cuda.set_sync_debug_mode(_WARN)
        self._counting = True

    def _stop(self) -> None:
        if not self._counting:
            return
        self._counting = False
        if torch.cuda.get_sync_debug_mode() == _WARN:
            torch.cuda.set_sync_debug_mode(0)
        if warnings.showwarning == self._show:
            warnings.showwarning = self._shown

    def _show(self, message: Warning | str, category: type[Warning], filename: str, lineno: int,
              file: TextIO | None = None, line: str | None = None) -> None:
        if not re.match(_WAIT, str(message)):
            self._shown(message, category, filename, lineno, file, line)
        elif not self._paused and not is_compiling() and (threading.get_ident() == self._thread or _in_backward()):
            self._places[filename, lineno] += 1


def is_compiling() -> bool:
    """Return whether torch.compile is at work in this thread, which reads values for itself, once a graph."""
    return torch._guards.CompileContext.current_compile_id() is not None


def _in_backward() -> bool:
    """Return whether this thread is one of autograd's, which run the backward for each device."""
    return torch._C._current_graph_task_id() != -1


class Contention:
    """Measures how long the slowest thread of this process waited for a core, since each step waits for it.

    Does nothing on other devices, or if the system does not count this.
    """

    def __init__(self, device: torch.device):
        self._enabled = device.type == "cpu" and bool(_waited())
        self._warned = False
        self.reset()

    def reset(self) -> None:
        """Start measuring, at the start of an epoch."""
        self._checked = self._warned
        self._began = time.monotonic()
        self._before = _waited() if self._enabled else {}

    def share(self) -> float | None:
        """Return the share of the time since ``reset`` that the slowest thread waited; None if not measured."""
        passed = time.monotonic() - self._began
        if not self._enabled or passed <= 0:
            return None
        waited = (seconds - self._before.get(thread, 0.0) for thread, seconds in _waited().items())
        return min(1.0, max(waited, default=0.0) / passed)

    def step(self) -> None:
        """Warn, after a step, if the epoch has run long enough to tell."""
        self._measure(_MEASURE_AFTER)

    def close(self) -> float | None:
        """Warn, at the end of an epoch, if there was no warning yet, and return its share."""
        self._measure(_MIN_SECONDS)
        return self.share()

    def _measure(self, after: float) -> None:
        """Warn once in a run, and check at most once in an epoch."""
        if self._checked or not self._enabled or time.monotonic() - self._began < after:
            return
        self._checked, share = True, self.share()
        if share is not None and share > _WORTH_REPORTING:
            self._warned = True
            threads = torch.get_num_threads()
            all_wait, advice = "", ""
            if threads > 1:
                all_wait = f", and its {threads} threads all wait for the slowest"
                advice = f": set OMP_NUM_THREADS={threads // 2}, or to the number of free cores"
            if ranks.is_main():
                logger.warning("Training waited for a core %.0f %% of the time%s. Other processes, data workers or "
                               "ranks use the cores%s", 100 * share, all_wait, advice)


def _waited() -> dict[str, float]:
    """Return the seconds that each thread has waited for a core."""
    found: dict[str, float] = {}
    try:
        threads = os.listdir(THREADS)
    except OSError:
        return found
    for thread in threads:
        try:
            ran, waited = map(int, (THREADS / thread / "schedstat").read_text().split()[:2])
        except (OSError, ValueError):  # the thread has just ended
            continue
        if ran:  # otherwise this kernel does not count
            found[thread] = waited / 1e9
    return found
