"""Means of losses: what counts how much, and what is left out."""

import math

import pytest
import torch

from sbkit.train.monitor.tally import DeviceMean
from sbkit.train.step import Loss

BAD = [math.nan, math.inf, -math.inf]


def mean(*losses):
    tally = DeviceMean("cpu")
    for loss in losses:
        tally.add(loss)
    return tally.value()


def test_the_mean_of_an_evaluation_is_by_count():
    assert mean(Loss(torch.tensor(6.0), torch.tensor(4)), Loss(torch.tensor([3.0]), 2.0)) == pytest.approx(1.5)
    assert mean(torch.tensor(1.0), 2.0, Loss(torch.tensor(9.0), 1)) == pytest.approx(4.0)


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_is_left_out_with_its_count(bad):
    assert mean(Loss(torch.tensor(bad), 7.0), Loss(torch.tensor(6.0), 4.0), torch.tensor(bad)) == pytest.approx(1.5)


def test_an_evaluation_of_nothing_but_what_was_left_out_has_no_mean():
    assert all(math.isnan(mean(*losses)) for losses in (BAD, [Loss(torch.tensor(math.nan), torch.tensor(3))]))
    assert math.isnan(mean(Loss(torch.tensor(0.0), 0.0), math.nan)), "a stand-in beside it is no loss"


def test_the_mean_of_nothing_is_unknown():
    assert math.isnan(mean()) and math.isnan(mean(Loss(torch.tensor(0.0), 0.0)))
