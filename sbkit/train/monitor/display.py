"""The progress bar of a stage, with loss, speed and the share of time spent waiting for data."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO

import torch
from tqdm import tqdm

from sbkit.nn.peek import Peek
from sbkit.recipe.speed import Utilisation
from sbkit.system.console import LINE_SECONDS
from sbkit.train import compiling
from sbkit.train.distributed import ranks
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.monitor.tally import Mean
from sbkit.train.monitor.timing import StepBudget
from sbkit.train.rates import Rate
from sbkit.train.step import StepResult

logger = logging.getLogger(__name__)


class Progress:
    """Collects values of batches and steps, without waiting for the device, and reports them.

    metrics : gets a line every ``interval`` seconds; None: no lines
    compiled : whether to report the number of graphs compiled in the epoch
    """

    def __init__(self, display: StageDisplay, metrics: MetricsLog | None, budget: StepBudget, epoch: int,
                 interval: float, compiled: bool = False):
        self.display, self.metrics, self.budget = display, metrics, budget
        self.epoch, self.interval, self.utilisation = epoch, interval, display.utilisation
        self._graphs = compiling.graphs() if compiled else None
        self.skipped = 0
        self._start = self._last = time.monotonic()
        self._seconds = self._padded = self._whole = self._whole_padded = 0.0
        self._steps = 0
        self._loss = Mean()
        self._norm: float | None = None
        self._extras: dict[str, Mean] = {}

    def batch(self, batch: object, steps: int, loss: Callable[[], float | None], lr: Rate | None) -> None:
        """Record a batch; ``steps``: how far the progress bar moves."""
        seconds, padded = getattr(batch, "seconds", 0.0), getattr(batch, "padded_seconds", 0.0)
        self._seconds += seconds
        self._padded += padded
        self._whole += seconds
        self._whole_padded += padded
        self.display.update(steps, loss=loss, lr=lr, seconds=seconds, padded_seconds=padded)

    def step(self, result: StepResult, lr: Rate | None) -> None:
        """Record the values of an optimizer step, and write a line if one is due."""
        self._steps += 1
        self.skipped += result.skipped
        self._loss.add(result.total, result.count)
        for name, (total, count) in result.extras.items():
            self._extras.setdefault(name, Mean()).add(total, count)
        self._norm = result.norm
        if self.metrics is not None and (result.number in (1, 10) or result.number % 100 == 0):
            self.metrics.write("loss", step=result.number, loss=result.loss)  # of this step alone: sbkit reproduce
        now = time.monotonic()
        if self.metrics is not None and now - self._last >= self.interval:
            self._write(self.metrics, result, lr, now)

    def _write(self, metrics: MetricsLog, result: StepResult, lr: Rate | None, now: float) -> None:
        speed = self._seconds * ranks.world_size() / (now - self._last)
        metrics.write(
            "step", epoch=self.epoch, step=result.number, loss=self._loss.known(),
            **{name: mean.value() for name, mean in self._extras.items()}, lr=lr, grad_norm=self._norm or None,
            audio_s_per_s=speed or None, **self._flops(speed), data_wait_share=self.budget.share("data"),
            padding_share=1 - self._seconds / self._padded if self._padded else None,
            skipped_steps=self.skipped, **({"loss_scale": result.scale} if result.scale != 1 else {}),
        )
        self._last, self._seconds, self._padded = now, 0.0, 0.0
        self._loss, self._extras = Mean(), {}

    def close(self, loss: float, step: int, began: float) -> None:
        """Report the whole epoch, whose training ``began`` then; waits for the device."""
        now = time.monotonic()
        took = now - self._start
        sections = self.budget.totals()
        total = sections.pop("total") or 1.0
        speed = self._whole * ranks.world_size() / took
        graphs = {} if self._graphs is None else {"graphs_compiled": compiling.graphs() - self._graphs}
        waits, waiting = self.budget.waits.per_step(), self.budget.waits.describe()
        core_wait = self.budget.contention.close()
        padding = 1 - self._whole / self._whole_padded if self._whole_padded else None
        if ranks.is_main() and self._steps:
            more = [f"graphs compiled {count}" for count in graphs.values()] + ([waiting] if waiting else [])
            logger.info("epoch %s: %s%s%s", self.epoch, self.budget.line(), self._speed_text(speed, padding),
                        "".join(f", {each}" for each in more))
        if self.metrics is not None:
            self.metrics.write(
                "epoch", epoch=self.epoch, step=step, train_loss=loss, train_seconds=round(now - began, 3),
                audio_s_per_s=speed or None, **self._flops(speed), **graphs, skipped_steps=self.skipped,
                padding_share=padding, **({} if waits is None else {"host_waits_per_step": round(waits, 3)}),
                **({} if core_wait is None else {"core_wait_share": round(core_wait, 4)}),
                time_shares={name: round(value / total, 4) for name, value in sections.items()},
            )

    def _flops(self, speed: float) -> dict[str, float | None]:
        """Return FLOP/s and MFU at a speed in seconds of audio a second on all devices together."""
        if self.utilisation is None or not speed:
            return {}
        return {"flops_per_s": self.utilisation.rate(speed),
                "mfu": self.utilisation.share(speed / ranks.world_size())}

    def _speed_text(self, speed: float, padding: float | None) -> str:
        if not speed or padding is None:
            return ""
        used = f", {self.utilisation.words(speed / ranks.world_size())}" if self.utilisation is not None else ""
        return f"; audio {speed:.3g} s/s, padding {100 * padding:.0f} %{used}"


Value = torch.Tensor | float | None | Callable[[], "torch.Tensor | float | None"]

REDRAW_SECONDS = 0.5
_WINDOW_SECONDS = 60.0  # period that speeds are averaged over
_BAR_CELLS = ((100, 8), (50, 4))  # (columns of the terminal, least cells of the bar)
_FIRST_STEPS = 10  # steps that wait for the first batches, and so aren't typical
_SLOW_DATA = 0.1  # share of waiting for data that is coloured
_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"


class StageDisplay:
    """A progress bar on stderr in a terminal, elsewhere a plain line each half minute.

    An update costs a few additions. Values are read only when the bar is redrawn: callables are called, and device
    tensors are copied in the background and shown at a later redraw, so a step never waits for them.

        with StageDisplay("train 3", total_steps=len(plan), initial=resumed_at, show=is_main(),
                          budget=budget) as display:
            for batch in batches:
                ...
                display.update(loss=lambda: loss_sum / loss_count, lr=lr, seconds=batch.seconds,
                               padded_seconds=batch.padded_seconds)

    stage : the text before the bar
    total_steps : the number of steps; None: unknown
    initial : steps that a resumed run has already done
    show : False shows nothing (on other ranks)
    budget : provides the share of time spent waiting for data
    scale : the number of ranks, which multiplies the audio seconds of this one
    utilisation : the FLOPs of a second of audio, if known
    """

    def __init__(
        self, stage: str, total_steps: int | None, initial: int = 0, show: bool = True, *,
        budget: StepBudget | None = None, scale: float = 1.0, colour: str | None = None,
        out: IO[str] | None = None, utilisation: Utilisation | None = None,
    ):
        self.stage, self.total, self.done, self.show = stage, total_steps, initial, show
        self._initial = initial
        self._out = sys.stderr if out is None else out
        self._budget, self._scale, self.utilisation = budget, scale, utilisation
        self._values: dict[str, Value] = {}
        self._peeks: dict[str, Peek] = {}
        self._shown: dict[str, float] = {}
        self._seconds = self._padded = 0.0
        self._start = time.monotonic()
        self._window: deque[tuple[float, int, float]] = deque([(self._start, initial, 0.0)])
        self._bar = None
        self._due = self._start + LINE_SECONDS
        if show and self._out.isatty():
            self._colours = not os.environ.get("NO_COLOR")
            self._bar = tqdm(
                total=total_steps, initial=initial, file=self._out, dynamic_ncols=True, mininterval=0,
                miniters=0, colour=colour if self._colours else None, bar_format=_literal(stage),
            )
            self._redraw()

    def update(
        self, steps: int = 1, *, loss: Value = None, lr: Value = None, seconds: float = 0.0,
        padded_seconds: float = 0.0,
    ) -> None:
        """Record steps, and redraw if it is time.

        loss, lr : a number, a tensor with one element (read at the next redraw, so don't overwrite it), or a callable
            that returns one
        seconds, padded_seconds : audio in the batch, without and with padding
        """
        if not self.show:
            return
        self.done += steps
        self._seconds += seconds
        self._padded += padded_seconds
        self._values = {"loss": loss, "lr": lr}
        if time.monotonic() >= self._due:
            self._redraw()

    def __enter__(self) -> StageDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        """Draw the final state, and leave it on the screen."""
        if self.show:
            self.show = False
            self._redraw(wait=error[0] is None)  # a device may wait for ranks that have failed
            if self._bar is not None:
                self._bar.close()

    def _redraw(self, wait: bool = False) -> None:
        now = time.monotonic()
        for name, value in self._values.items():
            self._read(name, value, wait)
        self._window.append((now, self.done, self._seconds))
        while len(self._window) > 2 and now - self._window[1][0] >= _WINDOW_SECONDS:
            self._window.popleft()
        percent = math.floor(100 * self.done / self.total) if self.total else 0
        steps = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        if self._bar is None:
            self._due = now + LINE_SECONDS
            steps += "" if self.total is None else f" ({percent} %)"
            print(f"{self.stage}: " + ", ".join([steps, *(text for text, _ in self._parts())]), file=self._out,
                  flush=True)
            return
        self._due = now + REDRAW_SECONDS
        columns = self._bar.format_dict["ncols"] or 80
        left = f"{self.stage} {percent:3d}%|" if self.total else f"{self.stage}: "
        cells = next((cells for least, cells in _BAR_CELLS if columns >= least and self.total), 0)
        middle, taken = ("{bar}| ", cells + 2) if cells else (" ", 1) if self.total else ("", 0)
        room = columns - len(left) - taken - len(steps)
        for text, colour in self._parts():  # those for which there is room, the most important first
            room -= len(text) + 2
            if room < 0:
                break
            steps += f", {colour}{text}{_PLAIN}" if colour and self._colours else f", {text}"
        self._bar.bar_format = _literal(left) + middle + _literal(steps)
        self._bar.n = min(self.done, self.total) if self.total else self.done
        self._bar.refresh()

    def _parts(self) -> Iterator[tuple[str, str]]:
        """Yield the parts of the text and their colours, the most important first."""
        now, steps, seconds = self._window[-1]
        then, steps_then, seconds_then = self._window[0]
        if not self.show:  # closed: speeds are of the whole stage
            then, steps_then, seconds_then = self._start, self._initial, 0.0
        span = max(now - then, 1e-9)
        if not self.show:
            yield f"took {_clock(now - self._start)}", ""
        elif self.total is not None and steps > steps_then:
            yield f"{_clock((self.total - steps) * span / (steps - steps_then))} left", ""
        if "loss" in self._shown:
            loss = self._shown["loss"]
            yield f"loss {_number(loss)}", "" if math.isfinite(loss) else _RED
        speed = (seconds - seconds_then) / span
        if speed > 0:
            shown = speed * self._scale
            yield f"audio {shown:.{0 if shown >= 10 else 1}f} s/s", ""
        waits = self._budget.share("data") if self._budget is not None else None
        if waits is not None and steps - self._initial >= (_FIRST_STEPS if self.show else 1):
            yield f"data wait {100 * waits:.0f} %", _YELLOW if waits > _SLOW_DATA else ""
        if "lr" in self._shown:
            yield f"lr {self._shown['lr']:.1e}".removesuffix(".0e+00"), ""
        if self._padded > 0:
            yield f"padding {100 * (1 - self._seconds / self._padded):.0f} %", ""
        if speed > 0 and self.utilisation is not None:
            yield self.utilisation.words(speed), ""

    def _read(self, name: str, value: Value, wait: bool) -> None:
        """Take a value that has arrived since the last call, then start copying the present one."""
        peek = self._peeks.pop(name, None)
        if peek is not None:
            if not peek.ready and not wait:
                self._peeks[name] = peek
                return
            self._shown[name] = peek.item()
        value = value() if callable(value) else value
        if isinstance(value, torch.Tensor):
            peek = Peek(value)
            if peek.ready or wait:
                self._shown[name] = peek.item()
            else:
                self._peeks[name] = peek
        elif value is not None:
            self._shown[name] = float(value)


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _number(value: float) -> str:
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.2e}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
