"""The progress of an epoch's training: its display, its lines in metrics.jsonl, and the line in the log at its end."""

from __future__ import annotations

import logging
import math
import time
from contextlib import AbstractContextManager
from typing import NamedTuple

from sbkit.train import compiling
from sbkit.train.distributed import ranks
from sbkit.train.loss import Mean
from sbkit.train.monitor.display import StageDisplay
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.monitor.timing import StepTimes
from sbkit.train.rates import Rate
from sbkit.train.results import StepResult

logger = logging.getLogger(__name__)


class _WrittenUntil(NamedTuple):
    """Where the last line in metrics.jsonl ends."""

    time: float
    seconds: float
    """Audio of this rank's batches until then."""
    padded_seconds: float


class EpochProgress(AbstractContextManager["EpochProgress"]):
    """Shows and writes how an epoch's training goes. Inside this context its display is on the screen.

    display : shows it
    times : where the time of steps goes
    metrics : gets a line every ``interval`` seconds; None: no lines
    compiled : whether to report the number of graphs compiled in the epoch
    """

    def __init__(self, display: StageDisplay, times: StepTimes, metrics: MetricsLog | None, *, epoch: int,
                 interval: float, compiled: bool = False):
        self.display = display
        self.times = times
        self.metrics = metrics
        self.epoch = epoch
        self.interval = interval
        self._graphs_before = compiling.compiled_graphs() if compiled else None
        self._steps = 0
        self._skipped_steps = 0
        self._results: list[StepResult] = []
        """Of the steps since the last line."""
        self._written = _WrittenUntil(display.started, 0.0, 0.0)
        self.due = self._next_due()
        """When something is to be shown or written next."""

    def __exit__(self, *error: object) -> None:
        self.display.__exit__(*error)

    def _next_due(self) -> float:
        line_is_due = math.inf if self.metrics is None else self._written.time + self.interval
        return min(self.display.draw_at, line_is_due)

    def count(self, batch: object, steps: int) -> None:
        """Count a batch; ``steps``: how far the bar moves."""
        self.display.count(batch, steps)

    def add(self, result: StepResult) -> None:
        """Record the result of an optimizer step."""
        self._steps += 1
        self._skipped_steps += result.skipped
        if self.metrics is not None:
            self._results.append(result._replace(batches=[]))  # their memory is needed

    def show(self, loss: float | None, rate: Rate | None) -> None:
        """Draw the display and write a line, each if it is due."""
        now = time.monotonic()
        if self.metrics is not None and self._results and now - self._written.time >= self.interval:
            self._write_line(self.metrics, rate, now)
        self.display.set_values(loss, rate)  # also for the final state, if none was drawn before
        if now >= self.display.draw_at:
            self.display.draw()
        self.due = self._next_due()

    def _write_line(self, metrics: MetricsLog, rate: Rate | None, now: float) -> None:
        """Write a line with the means of the steps since the last one."""
        means: dict[str, Mean] = {"loss": Mean()}
        for result in self._results:
            means["loss"].add(result.total, result.count)
            for name, (total, count) in result.extras.items():
                means.setdefault(name, Mean()).add(total, count)
        last = self._results[-1]
        self._results = []

        seconds = self.display.seconds - self._written.seconds
        padded_seconds = self.display.padded_seconds - self._written.padded_seconds
        speed = seconds * ranks.world_size() / (now - self._written.time)
        metrics.write(
            "step", epoch=self.epoch, step=last.number, loss=means.pop("loss").known(),
            **{name: mean.value() for name, mean in means.items()}, lr=rate, grad_norm=last.norm or None,
            audio_s_per_s=speed or None, **self._flops(speed), data_wait_share=self.times.data_share(),
            padding_share=1 - seconds / padded_seconds if padded_seconds else None,
            skipped_steps=self._skipped_steps, **({"loss_scale": last.scale} if last.scale != 1 else {}),
        )
        self._written = _WrittenUntil(now, self.display.seconds, self.display.padded_seconds)

    def close(self, loss: float, step: int, began: float) -> None:
        """Report the whole epoch, whose training ``began`` then; waits for the device."""
        now = time.monotonic()
        display = self.display
        sections = self.times.totals()
        speed = display.seconds * ranks.world_size() / (now - display.started)
        padding = 1 - display.seconds / display.padded_seconds if display.padded_seconds else None
        graphs = {}
        if self._graphs_before is not None:
            graphs["graphs_compiled"] = compiling.compiled_graphs() - self._graphs_before
        if ranks.is_main() and self._steps:
            self._log_summary(speed, padding, graphs.get("graphs_compiled"))
        if self.metrics is None:
            return

        timed = sum(sections.values()) or 1.0
        time_shares = {name: round(seconds / timed, 4) for name, seconds in sections.items()}
        self.metrics.write(
            "epoch", epoch=self.epoch, step=step, train_loss=loss, train_seconds=round(now - began, 3),
            audio_s_per_s=speed or None, **self._flops(speed), **graphs, skipped_steps=self._skipped_steps,
            padding_share=padding, **({"time_shares": time_shares} if self.times.timed else {}))

    def _log_summary(self, speed: float, padding: float | None, graphs_compiled: int | None) -> None:
        parts = []
        times_of_a_step = self.times.line()
        if times_of_a_step:  # an epoch of few steps may have timed none
            parts.append(times_of_a_step)
        if speed and padding is not None:
            of_audio = f"audio {speed:.3g} s/s, padding {100 * padding:.0f} %"
            if self.display.utilisation is not None:
                of_audio += f", {self.display.utilisation.words(speed / ranks.world_size())}"
            parts.append(of_audio)
        if graphs_compiled is not None:
            parts.append(f"graphs compiled {graphs_compiled}")
        if parts:
            logger.info("epoch %d: %s", self.epoch, "; ".join(parts))

    def _flops(self, speed: float) -> dict[str, float | None]:
        """Return FLOP/s and MFU at a speed in seconds of audio a second on all devices together."""
        utilisation = self.display.utilisation
        if utilisation is None or not speed:
            return {}
        return {"flops_per_s": utilisation.rate(speed), "mfu": utilisation.share(speed / ranks.world_size())}
