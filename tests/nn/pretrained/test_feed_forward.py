"""Feed-forward layers that compute the activation again in backward, against transformers' own."""

import copy

import pytest
import torch
from encoders import make
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Wav2Vec2Config
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2FeedForward

from sbkit.nn.adapters import LoRA
from sbkit.nn.pretrained.encoder import Encoder
from sbkit.nn.pretrained.layers import FeedForward, replace_layers


def pair(dropout=0.0, act="gelu"):
    torch.manual_seed(0)
    config = Wav2Vec2Config(hidden_size=8, intermediate_size=32, hidden_act=act, activation_dropout=dropout,
                            hidden_dropout=dropout)
    theirs = nn.ModuleDict({"ff": Wav2Vec2FeedForward(config)})
    ours = copy.deepcopy(theirs)
    replace_layers(ours)
    return theirs, ours


def passed(module, x):
    """The output, the gradients of the input and of all weights, and the numbers kept for backward, weights aside."""
    kept, weights = {}, {each.data_ptr() for each in module.parameters()}
    x = x.clone().requires_grad_()

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module["ff"](x)
    torch.manual_seed(2)  # masks must be those of forward
    out.square().sum().backward()
    return out.detach(), [x.grad, *(each.grad for each in module.parameters())], sum(kept.values())


@pytest.mark.parametrize("act", ["gelu", "swish"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_it_computes_the_same(dropout, act):
    theirs, ours = pair(dropout, act)
    x = torch.randn(2, 5, 8)
    expected, found = passed(theirs, x), passed(ours, x)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_adapters_within_draw_the_same_masks_in_backward(rate):
    theirs, ours = pair()
    for module in (theirs, ours):
        torch.manual_seed(3)
        LoRA(module, ["*_dense"], rank=2, dropout=rate)
        with torch.no_grad():
            for each in module.parameters():
                each.add_(0.1 * torch.randn_like(each))
    x = torch.randn(2, 5, 8)
    expected, found = passed(theirs, x), passed(ours, x)
    assert torch.equal(found[0], expected[0])
    grads = [each for each in zip(found[1], expected[1], strict=True) if each[1] is not None]
    assert len(grads) == 5 and all(torch.equal(one, other) for one, other in grads)


def test_what_is_frozen_is_computed_once():
    _, ours = pair()
    ours["ff"].output_dense.requires_grad_(False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        passed(ours, torch.randn(2, 5, 8))
    assert {each.key: each.count for each in profile.key_averages()}["aten::gelu"] == 1


def test_it_keeps_one_wide_result_less():
    theirs, ours = pair()
    x = torch.randn(2, 5, 8)
    assert passed(ours, x)[2] == passed(theirs, x)[2] - 2 * 5 * 32


def test_no_product_is_computed_again():
    flops = []
    for module in pair():
        with FlopCounterMode(display=False) as counter:
            passed(module, torch.randn(2, 5, 8))
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


@pytest.mark.parametrize("kind", ["wav2vec2-layer", "hubert-group", "wavlm-group", "w2v-bert"])
def test_encoders_of_these_families_have_it(kind, tmp_path):
    encoder = Encoder(str(make(tmp_path / kind, kind)), dropout=0.0)
    found = [module for module in encoder.modules() if isinstance(module, FeedForward)]
    assert len(found) == (4 if kind == "w2v-bert" else 2)
