"""The progress bar of a stage, with loss, speed and the share of time spent waiting for data."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import IO, NamedTuple

import torch
from tqdm import tqdm

from sbkit.nn.peek import Peek
from sbkit.train.monitor.timing import StepBudget
from sbkit.train.monitor.utilisation import Utilisation

Value = torch.Tensor | float | None | Callable[[], "torch.Tensor | float | None"]

REDRAW_SECONDS = 0.5
LINE_SECONDS = 30.0  # between plain lines, outside of a terminal
_WINDOW_SECONDS = 60.0  # period that speeds are averaged over
_BAR_CELLS = ((100, 8), (50, 4))  # (columns of the terminal, least cells of the bar)
_SLOW_DATA = 0.1  # share of waiting for data that is coloured


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

    Arguments
    ---------
    stage : the text before the bar
    total_steps : the number of steps; None: unknown
    initial : steps that a resumed run has already done
    show : False shows nothing (on other ranks)
    budget : provides the share of time spent waiting for data
    scale : the number of ranks, which multiplies the audio seconds of this one
    colour : the colour of the bar in a terminal
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
        self._terminal = show and self._out.isatty()
        self._budget, self._scale, self._utilisation = budget, scale, utilisation
        self._loss: Value = None
        self._lr: Value = None
        self._peeks: dict[str, Peek] = {}
        self._shown: dict[str, float] = {}
        self._seconds = self._padded = 0.0
        self._start = self._due = time.monotonic()
        self._due += REDRAW_SECONDS if self._terminal else LINE_SECONDS
        self._window: deque[tuple[float, int, float]] = deque([(self._start, initial, 0.0)])
        self._bar = None
        if self._terminal:
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
        if loss is not None:
            self._loss = loss
        if lr is not None:
            self._lr = lr
        if time.monotonic() >= self._due:
            self._redraw()

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._out)
        elif self.show:
            print(text, file=self._out, flush=True)

    def close(self, wait: bool = True) -> None:
        """Draw the final state, and leave it on the screen; ``wait``: for values on the device."""
        if not self.show:
            return
        self.show = False
        self._redraw(wait)
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> StageDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(wait=error[0] is None)  # a device may wait for ranks that have failed

    def line(self) -> str:
        """Return the state as a plain line."""
        steps = f"{self.done}" if self.total is None else f"{self.done}/{self.total} ({self._percent()} %)"
        return f"{self.stage}: " + ", ".join([steps, *(piece.words for piece in self._pieces())])

    def tail(self, columns: int) -> str:
        """Return the text right of the bar, in at most ``columns`` cells, leaving out the least important parts."""
        steps = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        pieces = self._pieces()
        while pieces and len(steps) + sum(len(piece.short) + 1 for piece in pieces) > columns:
            pieces.remove(max(pieces, key=lambda piece: piece.rank))
        words = len(", ".join([steps, *(piece.words for piece in pieces)])) <= columns
        colours = self._terminal and self._colours
        shown = [piece.paint(piece.words if words else piece.short, colours) for piece in pieces]
        return (", " if words else " ").join([steps, *shown])

    def _pieces(self) -> list[_StatusPart]:
        """Return all parts of the text, in the order in which they are shown."""
        now, steps, seconds = self._window[-1]
        then, steps_then, seconds_then = self._window[0]
        if not self.show:  # closed: speeds are of the whole stage
            then, steps_then, seconds_then = self._start, self._initial, 0.0
        span = max(now - then, 1e-9)
        pieces = []
        if not self.show:
            took = _clock(now - self._start)
            pieces.append(_StatusPart(1, f"took {took}", took))
        elif self.total is not None and steps > steps_then:
            left = _clock((self.total - steps) * span / (steps - steps_then))
            pieces.append(_StatusPart(1, f"{left} left", f"{left} left"))
        if "loss" in self._shown:
            loss = self._shown["loss"]
            text = f"loss {_number(loss)}"
            pieces.append(_StatusPart(0, text, text, None if math.isfinite(loss) else _RED))
        if "lr" in self._shown:
            text = f"lr {self._shown['lr']:.1e}"
            pieces.append(_StatusPart(4, text, text))
        if seconds > seconds_then:
            speed = (seconds - seconds_then) / span
            shown = _count(speed * self._scale)
            pieces.append(_StatusPart(2, f"audio {shown} s/s", f"{shown} s/s"))
            if self._utilisation is not None:
                used = self._utilisation.words(speed)
                pieces.append(_StatusPart(6, used, used))
        waits = self._budget.share("data") if self._budget is not None else None
        if waits is not None:
            colour = _YELLOW if waits > _SLOW_DATA else None
            pieces.append(_StatusPart(3, f"data wait {100 * waits:.0f} %", f"wait {100 * waits:.0f}%", colour))
        if self._padded > 0:
            share = f"{100 * (1 - self._seconds / self._padded):.0f}"
            pieces.append(_StatusPart(5, f"padding {share} %", f"pad {share}%"))
        return pieces

    def _percent(self) -> int:
        return math.floor(100 * self.done / self.total) if self.total else 0

    def _redraw(self, wait: bool = False) -> None:
        now = time.monotonic()
        self._read("loss", self._loss, wait)
        self._read("lr", self._lr, wait)
        self._window.append((now, self.done, self._seconds))
        while len(self._window) > 2 and now - self._window[1][0] >= _WINDOW_SECONDS:
            self._window.popleft()
        if self._bar is None:
            self._due = now + LINE_SECONDS
            print(self.line(), file=self._out, flush=True)
            return
        self._due = now + REDRAW_SECONDS
        columns = self._bar.format_dict["ncols"] or 80
        left = f"{self.stage} {self._percent():3d}%|" if self.total else f"{self.stage}: "
        cells = next((cells for least, cells in _BAR_CELLS if columns >= least and self.total), 0)
        middle, taken = ("{bar}| ", cells + 2) if cells else (" ", 1) if self.total else ("", 0)
        tail = self.tail(columns - len(left) - taken)
        self._bar.bar_format = _literal(left) + middle + _literal(tail)
        self._bar.n = min(self.done, self.total) if self.total else self.done
        self._bar.refresh()

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


_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"


class _StatusPart(NamedTuple):
    """A part of the text: its rank (0 is most important), long and short form, and colour."""

    rank: int
    words: str
    short: str
    colour: str | None = None

    def paint(self, text: str, colours: bool) -> str:
        return f"{self.colour}{text}{_PLAIN}" if self.colour and colours else text


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _number(value: float) -> str:
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.2e}"


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
