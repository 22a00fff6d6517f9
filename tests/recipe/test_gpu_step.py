"""Backward from node to node, as autograd's engine would on a GPU."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sbkit.recipe import gpu_step
from sbkit.recipe.flops import FlopCounter
from sbkit.recipe.trace import fake_tensors


class Scaled(torch.autograd.Function):
    """One with an input that needs no gradient, and two outputs of which one is used."""

    @staticmethod
    def forward(ctx, x, factor, weight):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x @ weight * factor, x + 1

    @staticmethod
    def backward(ctx, gradient, other):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t() * ctx.factor + other, None, x.t() @ gradient * ctx.factor


def block(number):
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) if number else nn.Linear(16, 16)


def forward(layers, weight, x, recomputed):
    x = torch.relu(layers[0](x))
    x, _ = Scaled.apply(x, 3.0, weight)
    for layer in layers[1:]:
        branch = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        x = nn.functional.layer_norm(x + torch.tanh(branch), (16,))
    return x.square().sum()


@pytest.mark.parametrize("recomputed", [False, True])
def test_it_computes_what_the_engine_does_and_frees_what_it_has_used(recomputed):
    found = []
    for by_node in (True, False):
        with fake_tensors():
            layers, weight = nn.ModuleList(map(block, range(4))), nn.Parameter(torch.ones(16, 16))
            x = torch.ones(8, 16, requires_grad=True)
            with FlopCounter() as counter:
                if by_node:
                    gpu_step.backward(lambda: forward(layers, weight, x, recomputed))  # noqa: B023 (called here)
                else:
                    forward(layers, weight, x, recomputed).backward()
        found.append(counter.operations)
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("shape", [(2, 5, 16), (2, 4, 5, 16)])
@pytest.mark.parametrize("mask", [None, torch.ones(5, 5, dtype=torch.bool)])
def test_attention_of_any_shape_has_the_shape_that_it_has(shape, mask):
    with fake_tensors():
        x = torch.ones(shape)
        with gpu_step.FusedAttention():
            found = nn.functional.scaled_dot_product_attention(x, x, x, None if mask is None else mask.clone())
    assert tuple(found.shape) == shape


def test_what_forward_saved_is_free_after_its_use():
    x, kept = torch.ones(3, requires_grad=True), []

    def compute():
        loss = (x * 2).exp().sum()
        kept.append(loss.grad_fn.next_functions[0][0])
        return loss

    gpu_step.backward(compute)
    with pytest.raises(IndexError):
        kept[0](torch.ones(3))
