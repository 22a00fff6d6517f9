"""No fake tensor outlives its forward, wherever a layer or a Brain keeps it."""

import functools
import gc
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from refusals import refused
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sbkit.nn.lengths import LengthRule
from sbkit.recipe import flops
from sbkit.recipe.check import check

pytestmark = pytest.mark.slow

MEMO = {}


def positions(size, device):
    return torch.arange(size, device=device).float()


def masks(size, device):
    return torch.ones(size, device=device), None


def closure():
    kept = []

    def remember(x):
        kept.append(x)
        return kept

    return remember


class Classes(OrderedDict):
    """Makes an object of the class that is asked for, as transformers' table of activations does."""

    def __getitem__(self, name):
        return super().__getitem__(name)()


class Caching(nn.Module):
    shared: ClassVar = {}

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table, self.nested = None, {"tables": [torch.ones(1)]}
        self.rule, self.remember = LengthRule.identity(), closure()
        self.partial = functools.partial(max, {})
        self.positions, self.masks = functools.cache(positions), functools.lru_cache(2)(masks)
        self.classes = Classes(relu=nn.ReLU)


def at_attribute(layer, x):
    layer.table = x.detach()


def at_list_in_dict(layer, x):
    layer.nested["tables"][0] = x.detach()
    layer.nested["size"] = (x.detach(), 3)


def at_plain_object(layer, x):
    layer.rule(torch.ones(2, dtype=torch.long, device=x.device))


def at_class(layer, x):
    layer.shared[4] = x.detach()


def at_own_container(layer, x):
    layer.classes["x"] = x.detach()


def at_global(layer, x):
    MEMO[4] = {"x": SimpleNamespace(x=x.detach())}


def at_new_global(layer, x):
    globals()["NEW"] = x.detach()


def at_functions(layer, x):
    layer.positions(4, x.device), layer.masks(4, x.device)


def at_closure(layer, x):
    layer.remember(x.detach())


def at_partial(layer, x):
    layer.partial.args[0]["x"] = x.detach()


def at_gradient(layer, x):
    layer.linear.weight.grad = torch.ones_like(layer.linear.weight)


class Model:
    """As much of a Brain as the count needs; on the meta device, which is another than that of the layer's tables."""

    device = "meta"

    def __init__(self, keep):
        self.modules, self.keep = nn.ModuleDict({"layer": Caching()}).to("meta"), keep
        self.trainer = SimpleNamespace(parallel=self)
        self.objects = SimpleNamespace(rule=LengthRule.identity())

    def dummy_batch(self, utterances, seconds):
        return torch.zeros(utterances, 4)

    def loss_of(self, batch):
        y = self.modules["layer"].linear(batch)
        self.objects.rule(torch.ones(2, dtype=torch.long, device=batch.device))
        self.keep(self.modules["layer"], y)
        return SimpleNamespace(loss=SimpleNamespace(total=y.sum()))


def fake_tensors():
    gc.collect()
    return sum(type(each) is FakeTensor for each in gc.get_objects())


def contents(layer):
    return str([vars(layer)["table"], layer.nested, layer.rule.table, layer.shared, MEMO, layer.remember(0),
                layer.partial, layer.classes, "NEW" in globals()])


@pytest.mark.parametrize("wrong", [{}, {"ctc_lin": "not a layer"}, {"compute_features": "not a layer"}])
def test_a_check_leaves_no_fake_tensors_to_the_run_that_it_is_of(wrong):
    before = fake_tensors()
    report = check(Path(__file__).parents[2] / "hparams" / "ctc.yaml", {"num_encoder_layers": 1, **wrong})
    assert bool(report.errors) == bool(wrong)
    assert fake_tensors() == before


@pytest.mark.parametrize("keep", [at_attribute, at_list_in_dict, at_plain_object, at_class, at_own_container, at_global,
                                  at_new_global, at_functions, at_closure, at_partial, at_gradient])
def test_what_a_forward_keeps_is_as_before(keep):
    model, before = Model(keep), fake_tensors()
    held = contents(model.modules["layer"]).replace("[0]", "[0, 0]")
    flops.run(model, 2, 3.0, flops.FlopCounter)
    assert fake_tensors() == before
    assert contents(model.modules["layer"]) == held
    assert model.objects.rule.table.tolist() == LengthRule.identity().table.tolist()


def test_who_keeps_what_cannot_be_undone_is_named():
    class Unknown:
        """One whose attributes belong to no object that the Brain reaches."""

    def keep(layer, x):
        Unknown.table = x.detach()

    with refused("fake-tensor") as caught:
        flops.run(Model(keep), 2, 3.0, flops.FlopCounter)
    assert "buffer" in caught.value.hint
