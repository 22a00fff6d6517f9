"""Whether a run from trained weights is behind a finished run from random weights on the same data."""

from __future__ import annotations

import filecmp
import itertools
from pathlib import Path

from sbkit.errors import SbkitError
from sbkit.recipe import load
from sbkit.score.metric import Metric
from sbkit.score.report import data
from sbkit.score.run_files import MANIFESTS, RECIPE, TESTED
from sbkit.system.console import time_span

#: Relative difference from which it is told: the dev set of a small corpus is noisy.
MUCH = 0.1
Curve = list[tuple[float, float]]  # the best metric so far by seconds of training, after each validation


def warning(run: Path, metric: Metric) -> str:
    """Say so at the first validation after which a run is behind one beside its folder; otherwise empty.

    A run counts if it has the same dev set; compared is the best validation within the same time of training.
    """
    for other in sorted(path.parent for path in run.parent.glob(f"*/{TESTED}")):
        try:
            same = filecmp.cmp(run / MANIFESTS / "dev.csv", other / MANIFESTS / "dev.csv", shallow=False)
            values = load.tree(other / RECIPE).texts()
        except (SbkitError, OSError):  # another's files must not end this run
            continue
        if not same or any(values.get(key, "null") != "null" for key in ("init_from", "encoder_source", "pretrainer")):
            continue
        curve = _curve(run, metric)
        other_curve = _curve(other, metric)
        if _is_behind(curve, other_curve, metric) and not _is_behind(curve[:-1], other_curve, metric):
            seconds, value = curve[-1]
            other_value = _value_at(other_curve, seconds)
            assert other_value is not None, "a curve is behind another only where that has a value"
            return (f"After {time_span(seconds)} of training the best dev {metric.name} is {value:.2f}. From random "
                    f"weights {other} had {other_value:.2f} by then, so what this run starts from "
                    "does harm as it is used here: docs/how-to/finetune.md#when-it-wont-fit-or-wont-learn")
    return ""


def _curve(run: Path, metric: Metric) -> Curve:
    try:
        epochs = [(epoch.get("train_seconds"), epoch.get(f"valid_{metric.name}")) for epoch in data.read(run).epochs]
    except (SbkitError, OSError, ValueError, LookupError, TypeError):
        return []
    validated = [(seconds, value) for seconds, value in epochs if seconds is not None and value is not None]
    best = min if metric.lower_is_better else max
    return list(zip(itertools.accumulate(seconds for seconds, _ in validated),
                    itertools.accumulate((value for _, value in validated), best), strict=True))


def _value_at(curve: Curve, seconds: float) -> float | None:
    """The best metric after that much training; None before the first validation."""
    values = [value for at, value in curve if at <= seconds]
    return values[-1] if values else None


def _is_behind(curve: Curve, other_curve: Curve, metric: Metric) -> bool:
    """Whether the last value of a curve is much worse than the other's by then."""
    if not curve:
        return False
    seconds, value = curve[-1]
    other_value = _value_at(other_curve, seconds)
    if other_value is None:
        return False
    return value > (1 + MUCH) * other_value if metric.lower_is_better else value < (1 - MUCH) * other_value
