"""Attention against SpeechBrain's in fp64; with dropout on a CPU, against the formula with the same random words."""

import pytest
import torch

from sbkit.nn.fast import dropout
from sbkit.nn.fast.attention import MultiheadAttention, RelPosMHAXL, RoPEMHA, attend, relative_shift

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


def masks(kind, b, heads, t):
    """Of pairs and of keys; True is ignored, numbers are added."""
    future, keys = torch.ones(t, t, dtype=torch.bool).triu(1), torch.arange(t) >= torch.tensor([t, t - 3])[:, None]
    return {"none": (None, None), "keys": (None, keys), "pairs": (future, None), "both": (future, keys),
            "heads": (torch.rand(b * heads, t, t) > 0.6, None),
            "added": (torch.randn(t, t, dtype=torch.float64), None)}[kind]


@pytest.mark.parametrize("kind, mask", [(kind, mask) for kind in (RelPosMHAXL, RoPEMHA, MultiheadAttention) for mask in
                                        ("none", "keys", "pairs", "both", "heads", "added")
                                        if kind is not RoPEMHA or mask not in ("heads", "added")])
def test_layers_equal_speechbrains_in_fp64(kind, mask, monkeypatch):
    # SpeechBrain's softmax of relative positions is in fp32 whatever it is given.
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: x.softmax(dim))
    torch.manual_seed(0)
    layer = kind(nhead=2, d_model=16) if kind is MultiheadAttention else kind(16, 2, vbias=True)
    x, positions = torch.randn(2, 9, 16).double().requires_grad_(), torch.randn(1, 17, 16).double()
    pairs, keys = masks(mask, 2, 2, 9)
    with torch.no_grad():
        for parameter in layer.double().parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))

    def run(x):
        given = {"pos_embs": positions} if kind is RelPosMHAXL else {}
        return layer(x, x, x, attn_mask=pairs, key_padding_mask=keys, **given)[0]

    ours = [*gradients(run, x), *torch.autograd.grad(run(x).square().sum(), list(layer.parameters()))]
    layer.__class__ = kind.__base__
    theirs = [*gradients(run, x), *torch.autograd.grad(run(x).square().sum(), list(layer.parameters()))]
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-11, rtol=1e-11)


def test_relative_scores_are_shifted_as_for_export(monkeypatch):
    """Which pads where training views, to be right for any number of frames."""
    for t in (1, 2, 7):
        scores = torch.randn(2, 3, t, 2 * t - 1)
        viewed = relative_shift(scores)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_exporting", lambda: True)
            assert torch.equal(relative_shift(scores), viewed)
