"""Attention with dropout on a CPU against the formula written out, with the same random words: values and gradients."""

import pytest
import torch

from sbkit.nn.fast import dropout
from sbkit.nn.fast.attention import RelPosMHAXL, RoPEMHA, attend, split_rotary_heads

P, SCALE = 0.3, 0.25


def written_out(q, k, v, bias, keep, factor):
    scores = q @ k.transpose(-1, -2) * SCALE
    if bias is not None:
        scores = scores.masked_fill(~bias, -1e30) if bias.dtype == torch.bool else scores + bias
    return (scores.softmax(-1) * keep * factor) @ v


def gradients(run, *leaves):
    out = run(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out, *torch.autograd.grad((out.double() * weights).sum(), [x for x in leaves if x.requires_grad])]


@pytest.mark.parametrize("precision, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("kind", ["none", "keys", "added"])
def test_attention_with_dropout_is_the_formula(kind, precision, tolerance):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, t, 8).to(precision).requires_grad_() for t in (5, 7, 7))
    bias = {"none": None, "keys": torch.rand(2, 1, 1, 7) > 0.3,
            "added": torch.randn(2, 3, 5, 7).to(precision).requires_grad_()}[kind]
    leaves = [x for x in (q, k, v, bias) if x is not None]
    torch.manual_seed(7)
    fast = gradients(lambda q, k, v, bias=None: attend(q, k, v, bias, P, SCALE), *leaves)
    torch.manual_seed(7)
    drop = dropout.levels(P)
    keep = dropout.keep(dropout.draw(2 * 3 * 5 * 7), drop, torch.empty(2, 3, 5, 7, dtype=torch.float64))
    assert 0 < keep.mean() < 1
    wide = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in leaves]
    slow = gradients(lambda q, k, v, bias=None: written_out(q, k, v, bias, keep, dropout.factor(drop)), *wide)
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)


def test_an_utterance_that_is_all_padding_gives_numbers():
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    out = attend(q, q, q, torch.zeros(1, 1, 1, 4, dtype=torch.bool), P, SCALE)
    out.sum().backward()
    assert out.isfinite().all() and q.grad.isfinite().all()


@pytest.mark.parametrize("kind", [RelPosMHAXL, RoPEMHA])
def test_values_with_a_bias_train_in_bf16(kind):
    torch.manual_seed(0)
    layer = kind(16, 2, dropout=P, vbias=True)
    x, positions = torch.randn(2, 7, 16), torch.randn(1, 13, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = layer(x, x, x, pos_embs=positions if kind is RelPosMHAXL else None)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and layer.value_bias_weight.grad.abs().max() > 0


@pytest.mark.parametrize("precision, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_heads_turned_as_complex_numbers_equal_those_turned_pair_by_pair(precision, tolerance):
    attention = RoPEMHA.__new__(RoPEMHA)  # both ways need the layer's code alone
    torch.manual_seed(0)
    qkv = torch.randn(2, 9, 3, 3 * 8).to(precision).requires_grad_()
    def joined(turn):
        return gradients(lambda x: torch.cat(turn(x), -1), qkv)

    for ours, theirs in zip(joined(attention._turned), joined(attention._rotated), strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    assert all(part.is_contiguous() for part in split_rotary_heads(qkv, torch.ones(9, 8), torch.zeros(9, 8)))
