"""The display of a stage: a bar with loss, speed and the time spent waiting for data, or lines without a terminal."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import IO, NamedTuple

import torch
from tqdm import tqdm

from sbkit.data.batch import as_planned
from sbkit.recipe.speed import Utilisation
from sbkit.system.console import LINE_SECONDS
from sbkit.train.distributed import ranks
from sbkit.train.monitor.timing import StepTimes
from sbkit.train.rates import Rate

REDRAW_SECONDS = 0.5
_WINDOW_SECONDS = 60.0  # period that speeds are averaged over
_BAR_CELLS = ((100, 8), (50, 4))  # (columns of the terminal, cells of the bar), the widest first
_SLOW_DATA = 0.1  # share of waiting for data that is coloured
_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"


class _Moment(NamedTuple):
    """What was done at a time, from which speeds are computed."""

    time: float
    steps: int
    seconds: float
    """Audio of this rank's batches so far."""


class StageDisplay(AbstractContextManager["StageDisplay"]):
    """A progress bar on stderr in a terminal, elsewhere a plain line each half minute.

        with StageDisplay("valid 3", total_steps=len(loader), show=is_main()) as display:
            for batch in loader:
                ...
                display.count(batch)
                if time.monotonic() >= display.draw_at:
                    display.draw()

    stage : the text before the bar
    total_steps : the number of steps; None: unknown
    initial : steps that a resumed run has already done
    show : False shows nothing (on other ranks)
    times : provides the share of time spent waiting for data
    utilisation : the FLOPs of a second of audio, if known
    """

    def __init__(
        self, stage: str, total_steps: int | None, initial: int = 0, show: bool = True, *,
        times: StepTimes | None = None, colour: str | None = None, out: IO[str] | None = None,
        utilisation: Utilisation | None = None,
    ):
        self.stage = stage
        self.total = total_steps
        self.done = initial
        self.shown = show
        self.utilisation = utilisation
        self._out = sys.stderr if out is None else out
        self._times = times
        self._loss: float | None = None
        self._rate: Rate | None = None
        self.seconds = 0.0
        """Audio of this rank's batches so far."""
        self.padded_seconds = 0.0
        """The same with padding."""
        self.started = time.monotonic()
        self._began = _Moment(self.started, initial, 0.0)
        self._drawn = deque([self._began])
        """When it was drawn in the period that speeds are averaged over, the oldest first."""
        self._bar: tqdm | None = None
        self._colours = False
        self.draw_at = self.started + LINE_SECONDS if show else math.inf
        """When it is to be drawn again."""
        if show and self._out.isatty():
            self._colours = not os.environ.get("NO_COLOR")
            self._bar = tqdm(
                total=total_steps, initial=initial, file=self._out, dynamic_ncols=True, mininterval=0,
                miniters=0, colour=colour if self._colours else None, bar_format=_literal(stage),
            )
            self.draw()

    def count(self, batch: object, steps: int = 1) -> None:
        """Count a batch; ``steps``: how far the bar moves."""
        self.done += steps
        planned = as_planned(batch)
        self.seconds += planned.seconds
        self.padded_seconds += planned.padded_seconds

    def __exit__(self, *error: object) -> None:
        """Draw the final state, and leave it on the screen."""
        if self.shown:
            self.draw(final=True)
            if self._bar is not None:
                self._bar.close()
        self.shown = False
        self.draw_at = math.inf

    def set_values(self, loss: float | None, rate: Rate | None) -> None:
        """Set what is shown from the next drawing on."""
        self._loss = loss
        self._rate = rate

    def draw(self, final: bool = False) -> None:
        """Draw the bar or print a line; ``final``: whether it is that of the whole stage, and stays."""
        now = time.monotonic()
        self._drawn.append(_Moment(now, self.done, self.seconds))
        while len(self._drawn) > 2 and now - self._drawn[1].time >= _WINDOW_SECONDS:
            self._drawn.popleft()
        if self._bar is None:
            self.draw_at = now + LINE_SECONDS
            self._print_line(final)
        else:
            self.draw_at = now + REDRAW_SECONDS
            self._draw_bar(self._bar, final)

    def _print_line(self, final: bool) -> None:
        """Print the progress as a plain line."""
        steps = f"{self.done}" if self.total is None else f"{self.done}/{self.total} ({self._percent()} %)"
        texts = [steps, *(text for text, _ in self._parts(final))]
        print(f"{self.stage}: {', '.join(texts)}", file=self._out, flush=True)

    def _draw_bar(self, bar: tqdm, final: bool) -> None:
        """Redraw the bar, with those parts of the text for which there is room, the most important first."""
        columns = bar.format_dict["ncols"] or 80
        before_bar = f"{self.stage} {self._percent():3d}%|" if self.total else f"{self.stage}: "
        cells = next((cells for least_columns, cells in _BAR_CELLS if columns >= least_columns and self.total), 0)
        if cells:
            the_bar = "{bar}| "
            width = cells + len("| ")
        else:
            the_bar = " " if self.total else ""
            width = len(the_bar)

        after_bar = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        room = columns - len(before_bar) - width - len(after_bar)
        for text, colour in self._parts(final):
            room -= len(text) + len(", ")
            if room < 0:
                break
            after_bar += f", {colour}{text}{_PLAIN}" if colour and self._colours else f", {text}"
        bar.bar_format = _literal(before_bar) + the_bar + _literal(after_bar)
        bar.n = min(self.done, self.total) if self.total else self.done
        bar.refresh()

    def _percent(self) -> int:
        return math.floor(100 * self.done / self.total) if self.total else 0

    def _parts(self, final: bool) -> Iterator[tuple[str, str]]:
        """Yield the parts of the text and their colours, the most important first; final speeds are of all steps."""
        now = self._drawn[-1]
        since = self._began if final else self._drawn[0]
        elapsed = max(now.time - since.time, 1e-9)
        if final:
            yield f"took {_clock(now.time - self.started)}", ""
        elif self.total is not None and now.steps > since.steps:
            yield f"{_clock((self.total - now.steps) * elapsed / (now.steps - since.steps))} left", ""
        if self._loss is not None:
            usual = self._loss == 0 or 0.001 <= abs(self._loss) < 1000
            yield f"loss {self._loss:{'.3f' if usual else '.2e'}}", "" if math.isfinite(self._loss) else _RED
        speed = (now.seconds - since.seconds) / elapsed
        if speed > 0:
            of_all_ranks = speed * ranks.world_size()
            yield f"audio {of_all_ranks:.{0 if of_all_ranks >= 10 else 1}f} s/s", ""
        waits = self._times.data_share() if self._times is not None else None
        if waits is not None:
            yield f"data wait {100 * waits:.0f} %", _YELLOW if waits > _SLOW_DATA else ""
        if self._rate is not None and not isinstance(self._rate, torch.Tensor):  # reading that would wait
            yield f"lr {self._rate:.1e}".removesuffix(".0e+00"), ""
        if self.padded_seconds > 0:
            yield f"padding {100 * (1 - self.seconds / self.padded_seconds):.0f} %", ""
        if speed > 0 and self.utilisation is not None:
            yield self.utilisation.words(speed), ""


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
