"""Where the time of a step goes: one step in ``EVERY`` is timed by sections, without stopping the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

SECTIONS = ("data", "forward", "loss", "backward", "optimizer")
#: One step in ``EVERY`` of a run is timed ...
EVERY = 8
#: ... after this many steps, which wait for workers and load kernels.
FIRST = 2


class _Mark(NamedTuple):
    """A moment in a step that is timed."""

    moment: Any  # seconds of the host's clock, or an event of CUDA's
    section: str | None
    """What the time since the last mark was; None: the step begins."""


class StepTimes:
    """Times one step in ``EVERY`` by sections.

    On the CPU, a section is timed by the host's clock. On CUDA, it is the time between two events on the stream,
    including idle time. So "data" is the time in which the device was idle because it had no batch, and not the time
    in which Python waited while the device was busy. ``data_share`` never waits for the device; ``totals`` does.

        times.begin(step)
        batch = next(batches)
        times.mark("data")
        ...
        times.mark("optimizer")
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self._is_timing = False
        """Whether the present step is timed."""
        self.reset()

    def reset(self) -> None:
        """Discard all measurements, at the start of an epoch."""
        self.timed = 0
        """The number of steps that were timed."""
        self._marks: list[_Mark] = []
        """Those that are not in ``_seconds`` yet."""
        self._seconds = dict.fromkeys(SECTIONS, 0.0)

    def begin(self, step: int) -> None:
        """Begin a step; ``mark`` does nothing unless it is one of those that are timed.

        step : the number of steps before it
        """
        self._is_timing = step % EVERY == FIRST
        if self._is_timing:
            self.totals(wait=False)  # on a rank that shows nothing, too, an epoch's events don't pile up
            self._marks.append(_Mark(self._now(), None))

    def mark(self, section: str) -> None:
        """Count the time since the last mark as that of a section; with "optimizer" the step ends."""
        if not self._is_timing:
            return
        self._marks.append(_Mark(self._now(), section))
        if section == "optimizer":
            self.timed += 1
            self._is_timing = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take no marks inside this context: what runs there is a trial, or is captured."""
        was_timing = self._is_timing
        self._is_timing = False
        try:
            yield
        finally:
            self._is_timing = was_timing

    def totals(self, wait: bool = True) -> dict[str, float]:
        """Return the seconds in each section of the steps that were timed; with ``wait``, of all of them."""
        on_cuda = self.device.type == "cuda"
        if on_cuda and wait and self._marks:
            self._marks[-1].moment.synchronize()
        while len(self._marks) > 1:
            begin, end = self._marks[:2]
            if on_cuda and not end.moment.query():
                break
            if end.section is not None and on_cuda:
                self._seconds[end.section] += begin.moment.elapsed_time(end.moment) / 1000
            elif end.section is not None:
                self._seconds[end.section] += end.moment - begin.moment
            del self._marks[0]
        return dict(self._seconds)

    def data_share(self) -> float | None:
        """Return the share of the time spent waiting for data, as far as it is known; None if no step was timed."""
        seconds = self.totals(wait=False)
        total = sum(seconds.values())
        return seconds["data"] / total if total > 0 else None

    def line(self) -> str:
        """Return the mean time of a step and the share of each section in words; empty if no step was timed."""
        seconds = self.totals()
        total = sum(seconds.values())
        if not self.timed or total <= 0:
            return ""
        step = total / self.timed
        mean = f"{step:.2f} s" if step >= 1 else f"{1000 * step:.{0 if step >= 0.01 else 1}f} ms"
        return f"step {mean}: " + ", ".join(f"{name} {100 * value / total:.0f} %" for name, value in seconds.items())

    def _now(self) -> Any:  # as in ``_Mark``
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
