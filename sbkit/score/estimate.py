"""Confidence intervals of any task's metric, by bootstrap over the recordings of its test set."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbkit.errors import SbkitError
from sbkit.score.metric import Metric
from sbkit.score.rates import first_few
from sbkit.score.significance import MIN_UTTERANCES, RunComparison, bounds

logger = logging.getLogger(__name__)

MIN_SAMPLES = 100
"""Fewer bootstrap samples give no interval."""
MAX_SAMPLES = 1000
MAX_SECONDS = 20.0
"""Sampling ends after this time, with as many samples as there are."""


@dataclass
class MetricEstimate:
    """A metric on a test set, on each of its recordings alone, and on bootstrap samples of them."""

    name: str
    lower_is_better: bool
    value: float
    ids: list[str]
    """Of the recordings, sorted."""
    values: list[float] = field(default_factory=list)
    """The metric of each recording alone; empty if one recording has none, as with an equal error rate."""
    drawn: list[float] = field(default_factory=list)
    """The metric of each bootstrap sample. Which recordings are drawn depends only on their number, so samples of two
    runs on the same test set are paired."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval: the bounds within which 95 % of the drawn values lie."""
        return bounds(np.array(self.drawn)) if len(self.drawn) >= MIN_SAMPLES else None

    @property
    def shown_interval(self) -> tuple[float, float] | None:
        """The interval, if there are enough recordings to show it."""
        return self.interval if len(self.ids) >= MIN_UTTERANCES else None

    def __str__(self) -> str:
        if self.shown_interval is None:
            return f"{self.name} {self.value:.4g}"
        low, high = self.shown_interval
        return f"{self.name} {self.value:.4g} ({low:.4g} to {high:.4g})"

    def worst(self) -> list[int]:
        """Indices of the recordings, the worst first."""
        order = np.argsort(np.array(self.values), kind="stable")
        return [int(i) for i in (order[::-1] if self.lower_is_better else order)]


def estimate(metric: Metric, rows: Sequence[Any], stats: Callable[[Sequence[Any]], Mapping[str, float]],
             ) -> MetricEstimate | None:
    """Compute a metric of independent rows, and its interval; None if ``stats`` lacks it.

    If ``stats`` fails on a single row, or on rows drawn with replacement, the values that need it are left out.
    """
    def value_of(some_rows: Sequence[Any]) -> float:
        value = float(stats(some_rows)[metric.name])
        if not math.isfinite(value):
            raise ValueError(f"it is {value}")
        return value

    if not rows:
        return None
    value = stats(rows).get(metric.name, math.nan)
    if not math.isfinite(value):
        return None
    result = MetricEstimate(metric.name, metric.lower_is_better, float(value), [row.id for row in rows])
    end = time.monotonic() + MAX_SECONDS
    try:
        result.values = [value_of([row]) for row in rows]
    except Exception as error:  # the task's own code, for values that a test doesn't need
        logger.debug("%s of one recording: %r", metric.name, error)
    try:
        rng = np.random.default_rng(0)
        while len(result.drawn) < MAX_SAMPLES and time.monotonic() < end:
            result.drawn.append(value_of([rows[i] for i in rng.integers(len(rows), size=len(rows))]))
    except Exception as error:
        logger.warning("The results have no interval for %s: stats fails on rows drawn at random (%s: %s)",
                       metric.name, type(error).__name__, error)
        result.drawn = []
    return result


def compare(a: MetricEstimate, b: MetricEstimate) -> RunComparison:
    """Test whether ``b`` differs from ``a`` on the same recordings, by a paired bootstrap."""
    if a.name != b.name:
        raise SbkitError("not-comparable", f"the runs have different metrics, {a.name} and {b.name}",
                         hint="compare runs of the same task")
    in_one_only = sorted(set(a.ids) ^ set(b.ids))
    if in_one_only:
        were = "recordings were" if len(in_one_only) > 1 else "recording was"
        raise SbkitError("not-comparable", f"{len(in_one_only)} {were} scored in one run only: "
                         f"{first_few(in_one_only)}", hint="compare runs on the same corpus")
    pairs = min(len(a.drawn), len(b.drawn))
    if pairs < MIN_SAMPLES:
        raise SbkitError("not-comparable", f"the results have too few samples of {a.name} to compare",
                         hint="score both runs again (sbkit evaluate)")
    difference = np.array(b.drawn[:pairs]) - np.array(a.drawn[:pairs])
    low, high = bounds(difference)
    tail = min(np.count_nonzero(difference <= 0), np.count_nonzero(difference >= 0))
    p_value = min(1.0, 2 * (tail + 1) / (pairs + 1))
    return RunComparison(a.value, b.value, low, high, p_value, a.name, a.lower_is_better)
