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
    for other in sorted(each.parent for each in run.parent.glob(f"*/{TESTED}")):
        try:
            same = filecmp.cmp(run / MANIFESTS / "dev.csv", other / MANIFESTS / "dev.csv", shallow=False)
            values = load.tree(other / RECIPE).texts()
        except (SbkitError, OSError):  # another's files must not end this run
            continue
        if not same or any(values.get(key, "null") != "null" for key in ("init_from", "encoder_source", "pretrainer")):
            continue
        own, curve = _curve(run, metric), _curve(other, metric)
        if _is_behind(own, curve, metric) and not _is_behind(own[:-1], curve, metric):
            seconds, value = own[-1]
            its = [each for at, each in curve if at <= seconds][-1]
            return (f"After {time_span(seconds)} of training the best dev {metric.name} is {value:.2f}. From random "
                    f"weights {other} had {its:.2f} by then, so what this run starts from "
                    "does harm as it is used here: docs/how-to/finetune.md#when-it-wont-fit-or-wont-learn")
    return ""


def _curve(run: Path, metric: Metric) -> Curve:
    try:
        epochs = [(each.get("train_seconds"), each.get(f"valid_{metric.name}")) for each in data.read(run).epochs]
    except (SbkitError, OSError, ValueError, LookupError, TypeError):
        return []
    known = [(seconds, value) for seconds, value in epochs if seconds is not None and value is not None]
    best = min if metric.lower_is_better else max
    return list(zip(itertools.accumulate(seconds for seconds, _ in known),
                    itertools.accumulate((value for _, value in known), best), strict=True))


def _is_behind(own: Curve, curve: Curve, metric: Metric) -> bool:
    known = [value for seconds, value in curve if seconds <= own[-1][0]] if own else []
    if not known:
        return False
    mine, its = own[-1][1], known[-1]
    return mine > (1 + MUCH) * its if metric.lower_is_better else mine < (1 - MUCH) * its
