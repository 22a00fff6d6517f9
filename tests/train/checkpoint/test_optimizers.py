"""Each optimizer of this package goes on from a checkpoint as if it had never stopped, and needs the memory it says."""

import importlib
import pkgutil

import pytest
import torch
from torch.optim import Optimizer

import sbkit.train
from sbkit.recipe.cost import states_per_parameter
from sbkit.train.checkpoint import Checkpointer

#: The options with which an optimizer keeps all that it can keep, by its name; the layer is what it trains.
OPTIONS = {"Muon": lambda layer: {"modules": [layer], "orthogonalize_every": 3}}


def subclasses(kind):
    for derived in kind.__subclasses__():
        yield derived
        yield from subclasses(derived)


def ours():
    for module in pkgutil.walk_packages(sbkit.train.__path__, "sbkit.train."):
        importlib.import_module(module.name)
    return sorted((kind for kind in set(subclasses(Optimizer)) if kind.__module__.startswith("sbkit.")),
                  key=lambda kind: kind.__name__)


def start(kind):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    options = OPTIONS.get(kind.__name__, lambda layer: {})(layer)
    return layer, kind(layer.parameters(), lr=0.1, **options)


def train(layer, optimizer, steps):
    for step in steps:
        batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        layer(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in layer.parameters()]


@pytest.mark.parametrize("kind", ours())
def test_an_optimizer_goes_on_from_a_checkpoint_to_the_bit(kind, tmp_path):
    """What it counts or keeps outside of its state and its groups is in no checkpoint."""
    layer, optimizer = start(kind)
    train(layer, optimizer, range(4))
    Checkpointer(tmp_path, {"layer": layer, "optimizer": optimizer}).save_checkpoint()
    expected = train(layer, optimizer, range(4, 9))

    layer, optimizer = start(kind)
    Checkpointer(tmp_path, {"layer": layer, "optimizer": optimizer}).recover_if_possible()
    actual = train(layer, optimizer, range(4, 9))
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("kind", ours())
def test_the_estimate_of_memory_counts_all_that_an_optimizer_keeps(kind):
    """``states_per_parameter`` of the class says how many numbers these are."""
    layer, optimizer = start(kind)
    train(layer, optimizer, range(4))
    for parameter in layer.parameters():
        kept = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
        assert sum(value.numel() for value in kept if value.dim()) <= states_per_parameter(kind) * parameter.numel()
