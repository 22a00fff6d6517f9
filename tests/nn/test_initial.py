"""Layers reinitialised: by what each one is, and the same for the same seed."""

from __future__ import annotations

import pytest
import torch
from conformers import conformer
from torch import nn

from sbkit.nn.initial import by_layer


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return conformer(8, 5, d_model=32, num_encoder_layers=1, kernel_size=15)


def depthwise(model: nn.Module) -> nn.Conv1d:
    (found,) = [layer for layer in model.modules() if isinstance(layer, nn.Conv1d) and layer.groups > 1]
    return found


def test_a_depthwise_convolution_begins_at_the_size_of_its_inputs():
    model = encoder()
    before = float(depthwise(model).weight.detach().std())
    by_layer(model)
    after = float(depthwise(model).weight.detach().std())
    assert after == pytest.approx(1 / (3 * 15) ** 0.5, rel=0.1) and after > 2 * before


def test_linear_layers_are_those_that_torch_makes():
    model, alone = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)), nn.Linear(6, 5)
    torch.manual_seed(3)
    alone.reset_parameters()
    torch.manual_seed(3)
    by_layer(model)
    assert torch.equal(model[0].weight, alone.weight) and torch.equal(model[0].bias, alone.bias)


def test_what_is_no_linear_or_convolutional_layer_stays():
    model = encoder()
    others = {name: value.clone() for name, value in model.state_dict().items() if "norm" in name or "in_proj" in name}
    by_layer(model)
    assert others and all(torch.equal(model.state_dict()[name], value) for name, value in others.items())
