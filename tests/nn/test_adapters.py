"""LoRA and Houlsby's adapters: they start as nothing, train alone, and LoRA goes into the weights."""

import copy
import pickle

import pytest
import torch
from conformers import conformer
from refusals import refused
from torch import nn

from sbkit.nn.accelerate import accelerate
from sbkit.nn.adapters import Houlsby, LoRA, is_added, merge


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)

    def forward(self, x):
        return x + self.second(self.first(x).relu()), "beside"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def step(model, x):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    for _ in range(3):  # the first one moves only what is zero
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return trained


@pytest.mark.parametrize("make", [
    lambda model: LoRA(model, ["layers.*.first", "layers.1.second"], rank=2, alpha=4),
    lambda model: Houlsby(model, "layers.?", size=3),
], ids=["lora", "houlsby"])
def test_it_starts_as_the_model_trains_alone_and_can_be_pickled(model, make):
    x, before = torch.randn(4, 6), copy.deepcopy(model)
    adapters = make(model)
    assert torch.equal(model(x), before(x))
    frozen = {name: p.clone() for name, p in model.named_parameters() if not is_added(name)}
    assert set(frozen) == set(dict(before.named_parameters())), "the model's own names stay"
    trained = step(model, x)
    assert all(p.grad is not None and p.grad.any() for p in trained) and len(trained) >= 2 * len(adapters.layers)
    assert all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in frozen.items())
    assert not torch.allclose(model(x), before(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_a_merged_lora_is_plain_layers_that_say_the_same(model):
    x, kinds = torch.randn(4, 6), [type(layer) for layer in model.modules()]
    LoRA(model, "*.first", rank=2, alpha=8)
    step(model, x)
    expected = model(x)
    assert merge(model) == 2 and merge(model) == 0
    assert [type(layer) for layer in model.modules()] == kinds
    assert not any(is_added(name) for name, _ in model.named_parameters())
    torch.testing.assert_close(model(x), expected)


def test_both_go_together_and_dropout_is_of_the_added_part(model):
    x = torch.randn(4, 6)
    LoRA(model, "*.first", rank=2, dropout=0.5)
    Houlsby(model, "layers.*", size=3)
    step(model, x)
    added = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[2] for name in added} == {"first", "adapter"}
    assert not torch.equal(model.train()(x), model(x)) and torch.equal(model.eval()(x), model(x))


def test_what_cannot_be_adapted_is_named_with_what_can(model):
    with refused("no-such-part") as error:
        LoRA(model, "q_proj")
    assert error.value.hint == "possible targets: ['*.first', '*.second'] (docs/how-to/finetune.md#adapters says " \
        "which are of attention)"
    with refused("no-such-part"):
        LoRA(model, ["q_proj", "*.first", "layers.?", "*.v_proj"])
    with refused("no-such-part"):
        Houlsby(torch.nn.Sequential(model), "*.block")
    with refused("no-such-part"):
        LoRA(model, "layers.0")
    with refused("bad-value"):
        LoRA(model, "*.first", rank=0)
    LoRA(model, "*.first")
    with refused("bad-value"):
        LoRA(model, "*.first")


@pytest.mark.parametrize("attention", ["RoPEMHA", "RelPosMHAXL", "regularMHA"])
def test_the_fast_layers_of_a_conformer_use_it(attention):
    """Each LoRA in any of its linear layers changes what comes out, and gets a gradient."""
    torch.manual_seed(0)
    model = conformer(8, 5, num_encoder_layers=1, attention_type=attention)
    lora = LoRA(model, "*", rank=2)
    accelerate(model)
    used = {path: layer for path, layer in lora.layers.items() if path.startswith(("encoder.", "custom_src"))}
    for layer in used.values():
        nn.init.normal_(layer.lora[2].weight)
    model.train()
    model.encode(torch.randn(2, 12, 8), torch.tensor([1.0, 0.7])).square().sum().backward()
    unused = [path for path, layer in used.items() if layer.lora[1].weight.grad is None]
    assert len(used) > 4 and unused == []


def test_an_adapted_layer_is_exported():
    torch.manual_seed(0)
    model = Model()
    LoRA(model, "*.first", rank=2)
    Houlsby(model, "layers.*", size=3)
    step(model, torch.randn(4, 6))
    x = torch.randn(4, 6)
    program = torch.export.export(model.eval(), (x,))
    torch.testing.assert_close(program.module()(x), model(x))
