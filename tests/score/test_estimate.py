"""Intervals of any metric cover the truth about as often as they promise; two runs are compared on the same rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from refusals import refused

from sbkit.score.estimate import MAX_SAMPLES, MetricEstimate, compare, estimate
from sbkit.score.metric import Metric
from sbkit.score.significance import RunComparison


class Row(NamedTuple):
    id: str
    value: float


HIGH, LOW = Metric("gain", lower_is_better=False), Metric("distance")


def means(rows):
    mean = float(np.mean([row.value for row in rows]))
    return {"gain": mean, "distance": mean}


def rows(values):
    return [Row(f"u{i:04}", float(value)) for i, value in enumerate(values)]


def test_an_interval_of_few_recordings_is_computed_and_not_shown():
    few = estimate(HIGH, rows(range(9)), means)
    assert few.interval is not None and few.shown_interval is None and str(few) == "gain 4"
    enough = estimate(HIGH, rows(range(10)), means)
    assert enough.shown_interval == enough.interval and " to " in str(enough)


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(0).normal(9, 2, 400)
    found = estimate(HIGH, rows(values), means)
    low, high = found.interval
    assert found.value == pytest.approx(values.mean()) and low < found.value < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1) and len(found.drawn) == MAX_SAMPLES
    assert found == estimate(HIGH, rows(values), means)  # drawn from a seed
    assert found.values == pytest.approx(values.tolist())
    assert str(found) == f"gain {found.value:.4g} ({low:.4g} to {high:.4g})"


def test_the_worst_recordings_come_first_whichever_way_is_better():
    values = [3.0, 1.0, 2.0]
    assert estimate(HIGH, rows(values), means).worst() == [1, 2, 0]
    assert estimate(LOW, rows(values), means).worst() == [0, 2, 1]


def test_what_stats_cannot_give_is_left_out(caplog):
    assert estimate(Metric("loss"), rows([1, 2]), means) is None and estimate(HIGH, [], means) is None
    assert estimate(HIGH, rows([1.0, 1.0]), means).interval == (1.0, 1.0)

    def pairs(some):  # one that compares rows can't take one alone
        values = [row.value for row in some]
        return {"gain": float(np.std(values) / (len(values) - 1)) if len(values) > 1 else float("nan")}

    assert estimate(HIGH, rows(range(30)), pairs).values == [] and estimate(HIGH, rows(range(30)), pairs).interval

    def seldom(some):  # undefined where no recording has the value, as an error rate is without trials of both kinds
        return {"gain": 1.0 if any(row.value for row in some) else float("nan")}

    rare = estimate(HIGH, rows([1, 0, 0]), seldom)
    assert rare.values == rare.drawn == [] and rare.interval is None and rare.value == 1.0
    assert estimate(HIGH, rows([0, 0]), seldom) is None

    def once(some):
        if len({row.id for row in some}) < len(some):
            raise ValueError("a recording comes twice")
        return {"gain": 1.0}

    broken = estimate(HIGH, rows(range(30)), once)
    assert broken.interval is None and str(broken) == "gain 1"
    assert "no interval for gain: stats fails on rows drawn at random (ValueError: a recording" in caplog.text


def test_two_runs_are_compared_in_pairs():
    rng = np.random.default_rng(2)
    hard = rng.normal(0, 5, 200)  # recordings differ far more than the runs
    a, b = (estimate(HIGH, rows(hard + rng.normal(mean, 0.5, 200)), means) for mean in (9.0, 9.5))
    better = compare(a, b)
    assert better.low < 0.5 < better.high and better.significant and better.better
    assert str(better) == f"Significantly better: gain {better.difference:+.4g}"
    assert not compare(b, a).better and str(compare(b, a)).startswith("Significantly worse: gain -")
    same = compare(a, a)
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1)
    assert str(same) == "No significant difference (gain +0)"


@pytest.mark.slow
def test_chance_is_not_called_a_difference():
    rng = np.random.default_rng(3)
    p_values = []
    for _ in range(30):
        a, b = (estimate(HIGH, rows(rng.normal(9, 2, 50)), means) for _ in range(2))
        p_values.append(compare(a, b).p_value)
    assert sum(p < 0.05 for p in p_values) <= 4


def test_what_cannot_be_compared_is_refused():
    a = estimate(HIGH, rows([1, 2, 3]), means)
    with refused("not-comparable"):
        compare(a, estimate(LOW, rows([1, 2, 3]), means))
    with refused("not-comparable"):
        compare(a, estimate(HIGH, rows([1, 2, 3, 4]), means))
    with refused("not-comparable"):
        compare(a, MetricEstimate("gain", False, 1.0, a.ids))


def test_a_lower_distance_is_better():
    assert RunComparison(2.0, 1.0, -1.5, -0.5, 0.001, "distance").better
    assert not RunComparison(2.0, 1.0, -1.5, -0.5, 0.001, "gain", lower_is_better=False).better
