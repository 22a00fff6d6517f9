"""Whether a model forgot: by the interval of its score on the old test before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbkit.score.metric import Metric
from sbkit.score.old_set import OldSet
from sbkit.score.weights import BEST_CHECKPOINT, ChosenWeights, Mean

NUMBERS = st.floats(0, 100)


@given(st.tuples(NUMBERS, NUMBERS, NUMBERS).map(sorted), NUMBERS)
def test_a_value_is_worse_beyond_the_bad_end_of_the_interval_alone(bounds, value):
    low, before, high = bounds
    assert OldSet("WER", True, before, (low, high)).is_worse(value) == (value > high)
    assert OldSet("accuracy", False, before, (low, high)).is_worse(value) == (value < low)


def test_what_is_no_number_is_worse():
    assert all(OldSet("WER", lower, 5.0, (4.0, 6.0)).is_worse(float("nan")) for lower in (True, False))


def test_it_is_kept_in_the_folder_and_says_what_saves_it(tmp_path):
    assert OldSet.read(tmp_path) is None
    found = OldSet("WER", True, 5.0, (4.0, 6.0))
    assert found.offer(tmp_path, BEST_CHECKPOINT) == ""
    found = OldSet("WER", True, 5.0, (4.0, 6.0), 0.5, 5.5, 20.25)
    found.write(tmp_path)
    read = OldSet.read(tmp_path)
    assert read is not None and read.offer(tmp_path, BEST_CHECKPOINT) == found.offer(tmp_path, BEST_CHECKPOINT)
    offer = read.offer(tmp_path, BEST_CHECKPOINT)
    assert f"export {tmp_path} --to BUNDLE --mean 0.5" in offer and "20.25 on" in offer
    assert "--mean 0.5 --average 3 exports" in read.offer(tmp_path, ChosenWeights(average=Mean(3)))
    assert [read.describe(each).split(", ")[1].split(" the ")[0] for each in (6.01, 6.0, 0.1)] == \
        ["beyond", "within", "better than"]
    (tmp_path / "old_set.json").write_text("[]")
    assert OldSet.read(tmp_path) is None


@pytest.mark.parametrize("interval", [None, (4.0, 6.0)])
def test_without_an_interval_any_loss_is_worse(interval):
    results = SimpleNamespace(stats={"WER": 5.0}, facts=lambda: {"WER_interval": interval} if interval else {})
    found = OldSet.of(Metric("WER"), results)
    assert found.is_worse(5.5) is (interval is None) and not found.is_worse(5.0)
