"""States of layers within an encoder: the right ones, normalised, with a gradient, and gone afterwards."""

import pytest
import torch
from refusals import refused
from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
from torch import nn

from sbkit.tasks.ctc.parts import layer_outputs


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return ConformerEncoder(num_layers=3, d_model=8, d_ffn=8, nhead=2, kernel_size=3, attention_type="RoPEMHA").eval()


def test_a_tapped_layer_is_the_encoder_that_ends_there(encoder):
    x = torch.randn(2, 7, 8)
    with layer_outputs(encoder, [1, 2]) as states:
        encoder(x)
    for count, state in enumerate(states, start=1):
        cut = encoder.layers
        encoder.layers = nn.ModuleList(cut[:count])
        torch.testing.assert_close(state, encoder(x)[0])
        encoder.layers = cut
    assert all(state.requires_grad for state in states)
    encoder(x)
    assert len(states) == 2, "afterwards nothing is kept"


def test_no_layers_cost_nothing():
    with layer_outputs(nn.Linear(2, 2), []) as states:
        assert states == []


@pytest.mark.parametrize("layers", [[0], [3], [9]])
def test_layers_that_are_not_within_are_named(encoder, layers):
    with refused("bad-value"), layer_outputs(encoder, layers):
        pass
    with refused("no-such-part"), layer_outputs(nn.Linear(2, 2), layers):
        pass
