"""Passes over a set: the mean of its losses, what counts how much and what is left out."""

import math

import pytest
import torch
from speechbrain.core import Stage
from toys import brain

from sbkit.train.step import Loss

BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("losses, mean", [
    ([Loss(torch.tensor(6.0), torch.tensor(4)), Loss(torch.tensor([3.0]), 2.0)], 1.5),
    ([torch.tensor(1.0), 2.0, Loss(torch.tensor(9.0), 1)], 4.0),
    *(([Loss(torch.tensor(bad), 7.0), Loss(torch.tensor(6.0), 4.0), torch.tensor(bad)], 1.5) for bad in BAD),
    (BAD, math.nan), ([Loss(torch.tensor(math.nan), torch.tensor(3))], math.nan), ([], math.nan),
    ([Loss(torch.tensor(0.0), 0.0)], math.nan), ([Loss(torch.tensor(0.0), 0.0), math.nan], math.nan)])
def test_the_mean_of_an_evaluation_is_by_count_of_what_is_finite(losses, mean):
    """Of nothing, or of stand-ins alone, it is unknown."""
    subject = brain()
    subject.evaluate_batch = lambda batch, stage: batch  # each batch is its loss
    with torch.no_grad():
        assert subject.pass_over(losses, Stage.VALID, "valid", False) == pytest.approx(mean, nan_ok=True)
