"""Which of several checkpoints is the most important."""

import math
from pathlib import Path

import pytest
from speechbrain.utils.checkpoints import Checkpoint

from sbkit.train.checkpoint.ranking import obsolete, ranked, unknown_key


def checkpoints(*metas):
    """One of each meta data, in the order of time, named by numbers from 0."""
    return [Checkpoint(Path(str(number)), {"unixtime": float(number), **meta}, {}) for number, meta in enumerate(metas)]


def names(found):
    return [checkpoint.path.name for checkpoint in found]


def test_without_a_metric_the_newest_comes_first():
    assert names(ranked(checkpoints({}, {}, {}))) == ["2", "1", "0"]


@pytest.mark.parametrize(("key", "order"), [("min_key", ["1", "0", "3"]), ("max_key", ["3", "0", "1"])])
def test_a_metric_leaves_out_checkpoints_that_do_not_have_it(key, order):
    found = checkpoints({"loss": 2.0}, {"loss": 1.0}, {}, {"loss": 3.0})
    assert names(ranked(found, **{key: "loss"})) == order


def test_of_equal_ones_the_newest_is_better():
    assert names(ranked(checkpoints({"loss": 1.0}, {"loss": 1.0}), min_key="loss")) == ["1", "0"]


@pytest.mark.parametrize("worst", [math.nan, "none"])
@pytest.mark.parametrize("key", ["min_key", "max_key"])
def test_what_is_no_number_comes_last(key, worst):
    assert names(ranked(checkpoints({"loss": 1.0}, {"loss": worst}), **{key: "loss"})) == ["0", "1"]


def test_of_error_rates_from_100_percent_on_the_lowest_loss_is_the_best():
    found = checkpoints({"WER": 100.0, "loss": 9.0}, {"WER": 140.0, "loss": 2.0}, {"WER": 120.0, "loss": math.nan},
                        {"WER": 99.0, "loss": 50.0})
    assert names(ranked(found, min_key="WER")) == ["3", "1", "0", "2"]


def test_only_one_key_is_allowed():
    with pytest.raises(ValueError, match="Must specify only one"):
        ranked([], min_key="loss", max_key="accuracy")


def test_what_is_best_by_any_ranking_is_kept():
    found = checkpoints({"loss": 1.0}, {"loss": 3.0}, {"loss": 2.0})
    assert names(obsolete([ranked(found), ranked(found, min_key="loss")], 1)) == ["1"]


def test_a_key_that_no_checkpoint_has_is_an_error_that_lists_the_others():
    metas = [{"unixtime": 1.0, "end-of-epoch": True, "WER": 3.0}, {"loss": 1.0}]
    assert unknown_key(["WER", None, "loss"], metas, "save") is None
    assert "no checkpoint in save has 'PER'" in str(unknown_key(["PER"], metas, "save"))
    assert "existing keys: WER, loss" in str(unknown_key(["PER"], metas, "save"))
    assert unknown_key(["PER"], [], "save") is None
