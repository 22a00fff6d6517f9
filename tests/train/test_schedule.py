"""The learning rate is a pure function of the step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sbkit.errors import SbkitError
from sbkit.train.schedule import Schedule


@pytest.mark.parametrize("shape, slow", [("cosine", 0.5 ** 0.5), ("linear", 0.5)])
def test_up_to_the_peak_and_down_to_the_end(shape, slow):
    """A cosine stays near its ends for longer: a quarter of the way it is so far from the middle."""
    schedule = Schedule(peak=2.0, warmup=10, shape=shape, final=0.1)
    schedule.total_steps = 110
    assert schedule(5) == pytest.approx(1.0)
    assert schedule(10) == pytest.approx(2.0)
    assert schedule(35) == pytest.approx(1.1 + 0.9 * slow)
    assert schedule(60) == pytest.approx(1.1)
    assert schedule(85) == pytest.approx(1.1 - 0.9 * slow)
    assert schedule(110) == pytest.approx(0.2)


@given(step=st.integers(1, 10_000), warmup=st.floats(0.001, 0.9), shape=st.sampled_from(["cosine", "linear", "noam"]))
def test_never_above_the_peak_nor_below_zero(step, warmup, shape):
    schedule = Schedule(peak=1.0, warmup=warmup, shape=shape)
    schedule.total_steps = 1000
    assert 0 <= schedule(step) <= 1.0


def test_noam_falls_with_the_square_root():
    schedule = Schedule(peak=1.0, warmup=100, shape="noam")
    assert schedule(400) == pytest.approx(0.5)


def test_groups_keep_their_ratio():
    slow, fast = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [slow], "lr_scale": 0.1}, {"params": [fast]}], lr=1.0)
    Schedule(peak=0.5, warmup=1, shape="constant").apply(optimizer, 7)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.5])


def test_an_unknown_shape_is_named():
    with pytest.raises(SbkitError, match="'cos' is not one of cosine"):
        Schedule(peak=1.0, shape="cos")
