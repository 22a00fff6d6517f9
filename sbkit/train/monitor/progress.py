"""Progress of a training epoch: its progress bar, lines of metrics.jsonl, and a summary line at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sbkit.recipe.speed import Utilisation
from sbkit.train import compiling
from sbkit.train.distributed import ranks
from sbkit.train.monitor.display import StageDisplay
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.monitor.tally import Mean
from sbkit.train.monitor.timing import StepBudget
from sbkit.train.rates import Rate
from sbkit.train.step import StepResult

logger = logging.getLogger(__name__)


class Progress:
    """Collects values of batches and steps, without waiting for the device, and reports them.

    Arguments
    ---------
    display : the progress bar
    metrics : gets a line every ``interval`` seconds; None: no lines
    budget : measures the parts of a step
    utilisation : the FLOPs of a second of audio, if known
    compiled : whether to report the number of graphs compiled in the epoch
    """

    def __init__(self, display: StageDisplay, metrics: MetricsLog | None, budget: StepBudget, epoch: int,
                 interval: float, utilisation: Utilisation | None = None,
                 compiled: bool = False):
        self.display, self.metrics, self.budget = display, metrics, budget
        self.epoch, self.interval, self.utilisation = epoch, interval, utilisation
        self._graphs = compiling.graphs() if compiled else None
        self.skipped = 0
        self._start = self._last = time.monotonic()
        self._seconds = self._padded = self._whole = self._whole_padded = 0.0
        self._steps = 0
        self._loss = Mean()
        self._norm: float | None = None
        self._extras: dict[str, Mean] = {}

    def batch(self, batch: object, steps: int, loss: Callable[[], float], lr: Rate | None) -> None:
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
            "step", epoch=self.epoch, step=result.number, loss=self._loss.value() if self._loss.count else None,
            **{name: mean.value() for name, mean in self._extras.items()}, lr=lr, grad_norm=self._norm,
            audio_s_per_s=speed or None, **self._used(speed), data_wait_share=self.budget.share("data"),
            padding_share=1 - self._seconds / self._padded if self._padded else None,
            skipped_steps=self.skipped, **({"loss_scale": result.scale} if result.scale != 1 else {}),
        )
        self._last, self._seconds, self._padded = now, 0.0, 0.0
        self._loss, self._extras = Mean(), {}

    def close(self, loss: float, step: int) -> None:
        """Report the whole epoch; waits for the device."""
        took = time.monotonic() - self._start
        sections = self.budget.totals()
        total = sections.pop("total") or 1.0
        speed = self._whole * ranks.world_size() / took
        graphs = {} if self._graphs is None else {"graphs_compiled": compiling.graphs() - self._graphs}
        waits, waiting = self.budget.waits.a_step(), self.budget.waits.words()
        held = self.budget.contention.close()
        padding = 1 - self._whole / self._whole_padded if self._whole_padded else None
        if ranks.is_main() and self._steps:
            more = [f"graphs compiled {count}" for count in graphs.values()] + ([waiting] if waiting else [])
            logger.info("epoch %s: %s%s%s", self.epoch, self.budget.line(), self._words(speed, padding),
                        "".join(f", {each}" for each in more))
        if self.metrics is not None:
            self.metrics.write(
                "epoch", epoch=self.epoch, step=step, train_loss=loss, train_seconds=round(took, 3),
                audio_s_per_s=speed or None, **self._used(speed), **graphs, skipped_steps=self.skipped,
                padding_share=padding, **({} if waits is None else {"host_waits_per_step": round(waits, 3)}),
                **({} if held is None else {"core_wait_share": round(held, 4)}),
                time_shares={name: round(value / total, 4) for name, value in sections.items()},
            )

    def _used(self, speed: float) -> dict[str, float | None]:
        """Return FLOP/s and MFU at a speed in seconds of audio a second on all devices together."""
        if self.utilisation is None or not speed:
            return {}
        return {"flops_per_s": self.utilisation.rate(speed),
                "mfu": self.utilisation.share(speed / ranks.world_size())}

    def _words(self, speed: float, padding: float | None) -> str:
        if not speed or padding is None:
            return ""
        used = f", {self.utilisation.words(speed / ranks.world_size())}" if self.utilisation is not None else ""
        return f"; audio {speed:.3g} s/s, padding {100 * padding:.0f} %{used}"
