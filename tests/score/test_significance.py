"""Intervals cover the truth about as often as they promise; differences are called real when they are."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import refused

from sbkit.score import significance
from sbkit.score.rates import ErrorRates
from sbkit.score.significance import MIN_UTTERANCES, compare, interval, interval_in_text


def run(wrong, names=None, words=10):
    """A run whose utterance i has ``wrong[i]`` substitutions in ``words`` words, or in ``words[i]``."""
    rates = ErrorRates()
    sizes = np.broadcast_to(words, len(wrong)).tolist()
    rates.add(
        names or [f"u{i}" for i in range(len(wrong))], [["w"] * size for size in sizes],
        [["x"] * int(count) + ["w"] * (size - int(count)) for count, size in zip(wrong, sizes, strict=True)])
    return rates


def test_the_interval_is_that_of_the_normal_distribution_and_the_same_again():
    rng = np.random.default_rng(2)
    wrong = rng.binomial(10, rng.choice([0.02, 0.3], size=2000))  # errors within an utterance are correlated
    low, high = interval(run(wrong))
    assert low < 10 * wrong.mean() < high and interval(run(wrong)) == (low, high)
    assert high - low == pytest.approx(2 * 1.96 * wrong.std() * 10 / np.sqrt(len(wrong)), rel=0.1)


def test_shows_no_interval_of_too_few_utterances():
    few = run([10, 10, 10])
    assert interval_in_text(few) == "unknown, fewer than 10 utterances"
    enough = run([1, 2] * (MIN_UTTERANCES // 2))
    low, high = interval(enough)
    assert interval_in_text(enough, " %") == f"{low:.2f} to {high:.2f} %"


@pytest.mark.slow
def test_a_real_difference_is_significant_and_chance_is_not(monkeypatch):
    rng = np.random.default_rng(3)
    difficulty = rng.choice([0.0, 0.1, 0.4], size=1000)
    a = run(rng.binomial(10, difficulty))
    better = compare(a, run(rng.binomial(10, 0.7 * difficulty)))
    assert better.significant and better.difference < 0 and better.low < better.difference < better.high < 0
    assert str(better).startswith("Significantly better: -")
    monkeypatch.setattr(significance, "PAIRED_RESAMPLES", 500)
    p_values = [compare(a, run(rng.binomial(10, difficulty))).p_value for _ in range(40)]
    assert sum(p < 0.05 for p in p_values) <= 6
    assert min(p_values) < 0.5 < max(p_values)


def test_equal_runs_do_not_differ_whatever_their_order():
    a = run([1, 2, 3], names=["x", "y", "z"])
    b = run([3, 2, 1], names=["z", "y", "x"])
    result = compare(a, b)
    assert (result.difference, result.low, result.high, result.p_value) == (0, 0, 0, 1)
    assert str(result) == "No significant difference (+0.00 points of WER)"


@pytest.mark.parametrize(("fewer", "changed"), [([3], 1), ([3, 1, 4], 3), ([1] * 5 + [0] * 20, 5)])
def test_of_few_utterances_that_differ_it_is_said_that_they_are_too_few(fewer, changed):
    worse = run([5] * len(fewer))
    better = run([5 - each for each in fewer])
    result = compare(worse, better)
    assert result.better and not result.significant and result.changed == changed
    differ = "utterance differs" if changed == 1 else "utterances differ"
    assert str(result) == (f"Too few utterances to tell ({result.difference:+.2f} points of WER): only {changed} "
                           f"{differ}, and a significant difference takes 6")


def test_six_utterances_that_are_all_better_are_enough():
    result = compare(run([2] * 6), run([1] * 6))
    assert result.significant and not result.too_few and str(result).startswith("Significantly better")


def test_the_p_value_is_that_of_all_ways_to_draw_the_signs():
    """Of six that are all one worse, two ways of 64 are as far off: all up and all down."""
    worse, better = run([2] * 6), run([1] * 6)
    for a, b in ((worse, better), (better, worse)):
        assert compare(a, b).p_value == pytest.approx(2 / 64, abs=0.006)


def test_each_utterance_is_found_among_many_at_once():
    class Name(str):
        looked_at = 0
        __hash__ = str.__hash__

        def __eq__(self, other):
            Name.looked_at += 1
            return str.__eq__(self, other)

    a, b = (run([0] * 500, names=[Name(f"u{i}") for i in range(500)], words=1) for _ in range(2))
    Name.looked_at = 0
    assert compare(a, b).difference == 0
    assert 0 < Name.looked_at < 20 * 500


def test_runs_on_other_corpora_are_refused():
    with refused("not-comparable"):
        compare(run([1, 2, 3]), run([1, 2]))
    with refused("not-comparable"):
        compare(run([1, 2]), run([1], names=["u9"]))
    with refused("not-comparable"):
        compare(run([1, 2]), run([1, 2], words=9))
    with refused("not-comparable"):
        compare(run([1]), run([1], words=9))
    with refused("not-comparable"):
        compare(run([1]), ErrorRates("character"))


@pytest.mark.slow
def test_many_utterances_have_the_interval_that_drawing_them_would_give(monkeypatch):
    drawn = np.random.default_rng(0)
    lengths = drawn.integers(3, 15, 12_000)
    edits = drawn.binomial(lengths, drawn.beta(1, 8, 12_000))
    quick = significance.interval_of(edits, lengths)
    monkeypatch.setattr(significance, "NORMAL_FROM", 1 << 30)
    slow = significance.interval_of(edits, lengths)
    width = slow[1] - slow[0]
    assert np.abs(np.subtract(quick, slow)).max() < 0.06 * width


@pytest.mark.slow
@pytest.mark.parametrize("share, likely", [(0.98, True), (1.4, False)])
def test_many_utterances_are_compared_as_drawing_them_would(share, likely, monkeypatch):
    drawn = np.random.default_rng(1)
    lengths = drawn.integers(2, 30, 3000)
    hard = 0.7 * drawn.beta(1, 8, 3000)
    a, b = run(drawn.binomial(lengths, hard), words=lengths), run(drawn.binomial(lengths, share * hard), words=lengths)
    slow = compare(a, b)
    assert (slow.p_value > 0.02) == likely
    monkeypatch.setattr(significance, "NORMAL_FROM", 2999)
    for name in ("_drawn_rates", "_permutation_p"):
        monkeypatch.setattr(significance, name, None)  # nothing is drawn
    quick = compare(a, b)
    width = slow.high - slow.low
    assert (quick.rate_a, quick.rate_b) == (slow.rate_a, slow.rate_b)
    assert (quick.low, quick.high) == pytest.approx((slow.low, slow.high), abs=0.04 * width)
    assert quick.p_value == pytest.approx(slow.p_value, abs=0.015)


def test_many_utterances_that_do_not_differ_have_p_1(monkeypatch):
    monkeypatch.setattr(significance, "NORMAL_FROM", 2)
    result = compare(run([1, 2, 3]), run([1, 2, 3]))
    assert (result.difference, result.low, result.high, result.p_value) == (0, 0, 0, 1)
    result = compare(run([1, 2, 3]), run([2, 1, 3]))
    assert result.p_value == 1 and result.low == -result.high < 0, "as many better as worse"
