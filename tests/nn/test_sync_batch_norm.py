"""Batch norm over two ranks is what one process computes of both batches."""

import pytest
import torch
from processes import results
from torch import nn

from sbkit.nn import sync_batch_norm

SHARES = slice(0, 3), slice(3, 8)  # ranks have batches of different sizes


def layers(shape):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(shape[-1], shape[-1]), nn.BatchNorm1d(shape[1], affine=len(shape) == 3), nn.Tanh(),
                         nn.BatchNorm1d(shape[1]))
    for layer in made.modules():
        if isinstance(layer, nn.BatchNorm1d) and layer.affine:
            nn.init.uniform_(layer.weight)
    return made


def computed(shape, share, convert):
    """Two steps' outputs, and the sums of gradients, of the rows of one rank."""
    x = 3 + 5 * torch.randn(8, *shape[1:], generator=torch.Generator().manual_seed(1))
    goal = torch.randn(8, *shape[1:], generator=torch.Generator().manual_seed(2))
    made = sync_batch_norm.convert(layers(shape)) if convert else layers(shape)
    given = x[share].clone().requires_grad_()
    for _ in range(2):
        output = made(given)
        ((output - goal[share]) ** 2).sum().backward()
    made.eval()
    return (output.detach(), given.grad, {name: each.grad for name, each in made.named_parameters()},
            dict(made.named_buffers()), made(given).detach())


def on_a_rank(shape):
    torch.distributed.init_process_group("gloo")
    return computed(shape, SHARES[torch.distributed.get_rank()], convert=True)


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 10)], ids=["vectors", "sequences"])
def test_two_ranks_normalise_as_one(shape):
    first, second = results(on_a_rank, shape)
    whole = computed(shape, slice(None), convert=False)
    for i in (0, 1, 4):
        torch.testing.assert_close(torch.cat([first[i], second[i]]), whole[i], rtol=1e-4, atol=1e-5)
    for name, gradient in whole[2].items():
        torch.testing.assert_close(first[2][name] + second[2][name], gradient, rtol=1e-4, atol=1e-4)
    for name, value in whole[3].items():
        torch.testing.assert_close(first[3][name], value, rtol=1e-5, atol=1e-5)
        assert torch.equal(first[3][name], second[3][name])


def test_parameters_keep_their_names():
    made = layers((8, 6))
    assert list(sync_batch_norm.convert(made).state_dict()) == list(layers((8, 6)).state_dict())
