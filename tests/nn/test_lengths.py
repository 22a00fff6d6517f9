"""Frame counts are exact integers, whatever else is in the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speechbrain.nnet.CNN import Conv1d

from sbkit.nn.lengths import LengthRule, lengths_to_mask


def conv(kernel, stride, padding=0, layers=1):
    return torch.nn.Sequential(*(Conv(kernel, stride, padding) for _ in range(layers)))


class Conv(torch.nn.Module):
    """[B, T, 3] -> [B, T', 3]"""

    def __init__(self, kernel, stride, padding):
        super().__init__()
        self.conv = torch.nn.Conv1d(3, 3, kernel, stride, padding)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


def test_layers_without_weights_have_the_same_rule():
    module = conv(5, 2, 2, 2)
    assert LengthRule.probe(module, 3).outputs == LengthRule.probe(module.to("meta"), 3).outputs


@settings(max_examples=30, deadline=None)
@given(kernel=st.integers(1, 5), stride=st.integers(1, 3), layers=st.integers(1, 2), frames=st.integers(30, 4000))
def test_the_rule_is_what_the_layers_do(kernel, stride, layers, frames):
    module = conv(kernel, stride, kernel // 2, layers)
    rule = LengthRule.probe(module, 3)
    expected = module.to("meta")(torch.empty(1, frames, 3, device="meta")).shape[1]
    assert rule.factor == stride**layers
    assert rule(frames) == expected
    assert rule(torch.tensor([frames, 1, frames])).tolist()[::2] == [expected, expected]


def test_much_subsampling_by_layers_that_reflect_their_input():
    """Short inputs are errors there, which is no rule."""
    module = torch.nn.Sequential(*(Conv1d(out_channels=3, kernel_size=5, stride=stride, in_channels=3)
                                   for stride in (6, 3)))
    rule = LengthRule.probe(module, 3)
    assert rule.factor == 18 and rule(1000) == module(torch.zeros(1, 1000, 3)).shape[1] == 56


def test_integers_and_tensors_agree():
    rule = LengthRule.probe(conv(3, 2, 1, 2), 3)
    lengths = torch.arange(1, 500)
    assert rule(lengths).tolist() == [rule(n) for n in range(1, 500)]


def test_layers_that_do_not_shorten_evenly_are_refused():
    with pytest.raises(ValueError, match="integer factor"):
        LengthRule([t * t for t in range(64)])


def test_mask():
    assert lengths_to_mask(torch.tensor([2, 0, 3]), 3).int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
