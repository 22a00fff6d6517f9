"""Error rates of verification, by an exhaustive reference; trials made and read."""

import contextlib
import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from speechbrain.utils import metric_stats

from sbkit.errors import SbkitError
from sbkit.score import verification
from sbkit.score.verification import all_pairs, from_list, rates, read_list


def shares(scores, same, threshold):
    """The shares of misses and of false alarms if scores from a threshold on are accepted."""
    of_one = [score for score, one in zip(scores, same, strict=True) if one]
    of_two = [score for score, one in zip(scores, same, strict=True) if not one]
    return (Fraction(sum(score < threshold for score in of_one), len(of_one)),
            Fraction(sum(score >= threshold for score in of_two), len(of_two)))


def crossing(points):
    """Where the path of (misses, false alarms) has as many of both, between two thresholds by their weights."""
    for (miss, false), (next_miss, next_false) in itertools.pairwise(points):
        if false <= miss and next_false >= next_miss:
            gap, next_gap = miss - false, next_false - next_miss
            return false + (next_false - false) * gap / (gap + next_gap) if gap + next_gap else false
    raise AssertionError("the path begins with all missed, and ends with all accepted")


trials = st.lists(st.tuples(st.integers(-6, 6), st.booleans()), min_size=2, max_size=40).filter(
    lambda found: len({one for _, one in found}) == 2)


@settings(max_examples=300, deadline=None)
@given(trials, st.sampled_from([0.01, 0.05, 0.5, 0.9]))
def test_rates_are_those_of_trying_every_threshold(found, p_target):
    scores, same = [score for score, _ in found], [one for _, one in found]
    points = [shares(scores, same, each) for each in (7, *sorted(set(scores), reverse=True))]
    share = Fraction(p_target)
    cost = min(share * miss + (1 - share) * false for miss, false in points) / min(share, 1 - share)
    mine = rates(np.array(scores, np.float32), np.array(same), p_target)
    assert mine.eer == pytest.approx(float(100 * crossing(points)), abs=1e-9)
    assert mine.min_dcf == pytest.approx(float(cost), abs=1e-9)
    miss, false = shares(scores, same, mine.threshold)
    assert false >= miss, "the threshold that is reported accepts enough"
    assert all(f < m for m, f in (shares(scores, same, each) for each in set(scores) if each > mine.threshold))


@pytest.mark.slow
def test_rates_are_near_speechbrains_where_trials_are_many():
    drawn = np.random.default_rng(0)
    same = drawn.random(3000) < 0.4
    scores = drawn.standard_normal(3000) + 2 * same
    of_one, of_two = torch.from_numpy(scores[same]), torch.from_numpy(scores[~same])
    mine = rates(scores, same)
    assert mine.eer == pytest.approx(100 * metric_stats.EER(of_one, of_two)[0], abs=0.1)
    assert mine.min_dcf == pytest.approx(metric_stats.minDCF(of_one, of_two)[0] / 0.01, abs=1e-3)


@pytest.mark.parametrize("same", [[], [True, True], [False]])
def test_without_trials_of_both_kinds_there_is_no_rate(same):
    assert np.isnan(rates(np.zeros(len(same)), np.array(same, bool))).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["", "anna", "ben", "carla"]), max_size=12))
def test_trials_are_all_pairs_of_those_who_are_known(speakers):
    found = all_pairs(speakers)
    pairs = [(i, j) for i in range(len(speakers)) for j in range(i + 1, len(speakers)) if speakers[i] and speakers[j]]
    assert list(zip(found.first.tolist(), found.second.tolist(), strict=True)) == pairs
    assert found.same.tolist() == [speakers[i] == speakers[j] for i, j in pairs]


def test_many_recordings_are_thinned_evenly(monkeypatch):
    monkeypatch.setattr(verification, "MAX_RECORDINGS", 10)
    found = all_pairs([f"s{i // 10}" for i in range(100)])
    assert len(found.same) == 45 and {0, 99} <= {*found.first.tolist(), *found.second.tolist()}


def test_a_list_is_read_and_its_recordings_are_found_with_or_without_a_suffix(tmp_path):
    path = tmp_path / "veri_test.txt"
    path.write_text("1 id1/a/1.wav id1/b/2.wav\n\n0 id1/a/1.wav id2/a/1.wav\n0 id1/a/1 gone.wav\n")
    found, missing = from_list(read_list(path), ["id1/a/1", "id1/b/2", "id2/a/1.wav"])
    assert [each.tolist() for each in found] == [[0, 0], [1, 2], [True, False]] and missing == 1


@pytest.mark.parametrize("text, code", [
    ("1 a b\n2 a b\n", "malformed-row"), ("1 a\n", "malformed-row"), ("1 a b c\n", "malformed-row"),
    ("\n", "no-utterances"),
])
def test_what_is_no_trial_is_refused_with_its_line(tmp_path, text, code):
    path = tmp_path / "trials.txt"
    path.write_text(text)
    with refused(code):
        read_list(path)


def test_a_list_that_is_not_there_is_named(tmp_path):
    with refused("no-such-path"):
        read_list(tmp_path / "gone.txt")


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_list_or_is_refused(text):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trials.txt")
        path.write_text(text, encoding="utf-8")
        with contextlib.suppress(SbkitError):
            assert all(isinstance(same, bool) and first and second for same, first, second in read_list(path))
