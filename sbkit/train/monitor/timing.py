"""Timing of the sections of a training step, without stopping the device."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from sbkit.train.monitor.waits import Contention, HostWaits

SECTIONS = ("data", "copy", "features", "forward", "loss", "backward", "all-reduce", "optimizer")

# Sections inside these don't count: a forward that activation checkpointing repeats is "backward".
_WHOLE = frozenset({"backward", "all-reduce", "optimizer"})
DRAIN_EVERY = 16  # steps between reads of events that have passed

_current: StepBudget | None = None


def section(name: str) -> contextlib.AbstractContextManager[object]:
    """Time a section of the step from anywhere in the code, if a ``StepBudget`` is active.

    >>> with section("features"):
    ...     pass
    """
    budget = _current
    if budget is None or torch.compiler.is_compiling():
        return _NOTHING
    return budget(name)


def profiler(warmup: int, steps: int, folder: str | os.PathLike[str]) -> torch.profiler.profile:
    """Return SpeechBrain's profiler, which saves ``steps`` steps in ``folder/profiler_logs``, without Python's stack.

    Functions of the stack overlap the sections, which Perfetto would then leave out.
    """
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=warmup, active=steps, repeat=1), record_shapes=True,
        on_trace_ready=torch.profiler.tensorboard_trace_handler(os.path.join(folder, "profiler_logs")))


class StepBudget:
    """Measures the time in each section over many steps; nested sections count only for the inner one.

    On the CPU, a section is timed by the host's clock. On CUDA, it is the time between two events on the stream,
    including idle time. So "data" is the time in which the device was idle because it had no batch, and not the time
    in which Python waited while the device was busy. Events are read after they have passed; only ``line()`` and
    ``totals()`` wait for the last one.

    "all-reduce" is only the exposed part. DDP reduces gradients while backward computes others, so only the part after
    the last gradient makes the step longer. ``exposed_all_reduce(loss)`` marks that point, and the time from there to
    the end of backward counts as "all-reduce".

    While torch's profiler runs (``--profile_training``), sections are spans in its trace.

        budget = StepBudget(device)
        with budget.active():
            with budget("data"): batch = next(batches)
            with budget("forward"): ...            # with section("features") somewhere inside
            with budget("backward"):
                budget.exposed_all_reduce(loss)
                loss.backward()
            with budget("optimizer"): ...
            budget.step()
        budget.line()   # "step 412 ms: data 1 %, copy 0 %, features 6 %, forward 31 %, ..."
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.clock: _HostClock | _CudaClock = (
            _CudaClock(self.device) if self.device.type == "cuda" else _HostClock()
        )
        self.waits = HostWaits(self.device)
        self.contention = Contention(self.device)
        self._sections = {name: _Section(self, name) for name in SECTIONS}
        self._open: list[str] = []
        self._spans: list[torch.profiler.record_function | None] = []  # spans of open sections in a profiler's trace
        self._thread = threading.get_ident()
        self.reset()

    def reset(self) -> None:
        """Discard all measurements, at the start of an epoch."""
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._total = 0.0
        self._steps = 0
        self._marks: deque[tuple[Any, str | None]] = deque()
        self._open.clear()
        self._spans.clear()
        self._last: Any = self.clock.now()  # a time or an event, depending on the clock
        self.waits.reset()
        self.contention.reset()

    @contextlib.contextmanager
    def active(self) -> Iterator[StepBudget]:
        """Let ``section()`` use this budget inside the context."""
        global _current
        before, _current = _current, self
        try:
            with self.waits:
                yield self
        finally:
            _current = before

    def __call__(self, name: str) -> contextlib.AbstractContextManager[object]:
        if threading.get_ident() != self._thread:
            return _NOTHING
        if self._open and self._open[-1] in _WHOLE:
            return _NOTHING
        return self._sections.get(name) or self._sections.setdefault(name, _Section(self, name))

    def step(self) -> None:
        """Record the end of an optimizer step."""
        self._mark()
        self.waits.step()
        self.contention.step()
        self._steps += 1
        if self._steps % DRAIN_EVERY == 0:
            self._drain(wait=False)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Don't count the time inside this context (validation, a checkpoint)."""
        self._mark()
        try:
            with self.waits.pause():
                yield
        finally:
            self._marks.append((self.clock.now(), None))

    def exposed_all_reduce(self, loss: torch.Tensor) -> None:
        """Mark the end of backward's computations; call it in ``budget("backward")`` before ``loss.backward()``."""
        if not loss.requires_grad:
            return

        def computed() -> None:  # runs once the last gradient is computed, before DDP waits for its buckets
            if self._open and self._open[-1] == "backward":
                self._mark()
                self._open[-1] = "all-reduce"

        def started(gradient: torch.Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(computed)

        loss.register_hook(started)

    def totals(self, wait: bool = True) -> dict[str, float]:
        """Return the seconds in each section, in "other" (no section) and in "total" since ``reset()``."""
        self._drain(wait)
        seconds = dict(self._seconds)
        seconds["other"] = max(0.0, self._total - sum(seconds.values()))
        seconds["total"] = self._total
        return seconds

    def share(self, name: str) -> float | None:
        """Return a section's share of the time measured so far, without waiting; None if there is none."""
        self._drain(wait=False)
        return self._seconds.get(name, 0.0) / self._total if self._total > 0 else None

    def line(self) -> str:
        """Return a line with the mean time of a step and the share of each section."""
        seconds = self.totals()
        total = seconds.pop("total")
        if not self._steps or total <= 0:
            return "no step was timed"
        step = total / self._steps
        shares = ", ".join(f"{name} {100 * value / total:.0f} %" for name, value in seconds.items())
        return f"step {_duration(step)}: {shares}"

    # Marks form a timeline: each has the section that the time since the previous mark belongs to.
    def _enter(self, name: str) -> None:
        self._mark()
        self._open.append(name)
        profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # torch's, which its types lack
        span = torch.profiler.record_function(name) if profiled else None
        self._spans.append(span)
        if span is not None:
            span.__enter__()

    def _leave(self) -> None:
        span = self._spans.pop()
        if span is not None:
            span.__exit__(None, None, None)
        self._mark()
        self._open.pop()

    def _mark(self) -> None:
        self._marks.append((self.clock.now(), self._open[-1] if self._open else "other"))

    def _drain(self, wait: bool) -> None:
        marks = self._marks
        if not marks:
            return
        if wait:
            self.clock.wait(marks[-1][0])
        while marks and self.clock.passed(marks[0][0]):
            moment, name = marks.popleft()
            if name is not None:
                spent = self.clock.between(self._last, moment)
                self._total += spent
                if name != "other":
                    self._seconds[name] = self._seconds.get(name, 0.0) + spent
            self.clock.recycle(self._last)
            self._last = moment


class _Section:
    """A reusable context, so that using a section allocates nothing."""

    __slots__ = ("_budget", "_name")

    def __init__(self, budget: StepBudget, name: str):
        self._budget, self._name = budget, name

    def __enter__(self) -> None:
        self._budget._enter(self._name)

    def __exit__(self, *error: object) -> None:
        self._budget._leave()


_NOTHING = contextlib.nullcontext()


class _HostClock:
    now = staticmethod(time.perf_counter)

    def between(self, a: float, b: float) -> float:
        return b - a

    def passed(self, moment: float) -> bool:
        return True

    def wait(self, moment: float) -> None:
        pass

    def recycle(self, moment: float) -> None:
        pass


class _CudaClock:
    """A clock of CUDA events on the current stream, which are reused."""

    def __init__(self, device: torch.device):
        self._device = device
        self.spare: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, a: torch.cuda.Event, b: torch.cuda.Event) -> float:
        return a.elapsed_time(b) / 1000

    def passed(self, moment: torch.cuda.Event) -> bool:
        return moment.query()

    def wait(self, moment: torch.cuda.Event) -> None:
        moment.synchronize()

    def recycle(self, moment: torch.cuda.Event) -> None:
        self.spare.append(moment)


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
