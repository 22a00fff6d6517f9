"""Learning rates by part and by depth, as multiples of the schedule's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from refusals import refused
from speechbrain.utils.epoch_loop import EpochCounter
from toys import SIZE, Block, ToyBrain, ToyTrainLoader, batch_of, brain, layers, state

from sbkit.train.checkpoint import Checkpointer
from sbkit.train.schedule import Schedule

SGD = partial(torch.optim.SGD, lr=0.1)


class Deep(ToyBrain):
    """Three equal layers between a first and a last one; a dummy batch shows their order."""

    def compute_forward(self, batch, stage):
        first, stack, last = self.hparams.model
        x = first(batch.x)
        for layer in (stack[1], stack[0], stack[2]):  # by use, and not as they are listed
            x = torch.tanh(layer(x))
        return last.project(x).squeeze(-1)

    def dummy_batch(self, utterances, seconds, noise=False):
        return batch_of(range(utterances))


def deep():
    torch.manual_seed(0)
    stack = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    return torch.nn.ModuleList([torch.nn.Linear(SIZE, 8), stack, Block(8, 1)])


def made(cls=ToyBrain, modules=None, opt_class=SGD, **hparams):
    modules = modules or layers()
    toy = brain(cls, opt_class, modules=modules, hparams={"head": modules[2], **hparams})
    toy.on_fit_start()
    return toy


def rates(toy):
    names = {id(p): name for name, p in toy.modules.named_parameters()}
    return {names[id(p)]: group["lr"] for group in toy.optimizer.param_groups for p in group["params"]}


def test_a_part_trains_at_its_multiple_of_the_rate():
    toy = made(learning_rates={"head": 10, "model.0.bias": 0.5, "head.bias": 2})
    assert rates(toy) == pytest.approx({
        "model.0.weight": 0.1, "model.0.bias": 0.05, "model.1.weight": 0.1, "model.2.weight": 1.0, "model.2.bias": 0.2,
        "model.3.weight": 0.1, "model.3.bias": 0.1})
    assert toy.trainer.learning_rate == pytest.approx(0.1)


def test_a_schedule_keeps_the_multiples():
    toy, schedule = made(learning_rates={"head": 10}), Schedule(peak=1.0, warmup=10, shape="constant")
    assert schedule.apply(toy.optimizer, 5) == 0.5
    assert rates(toy)["model.0.weight"] == 0.5 and rates(toy)["model.2.weight"] == 5.0
    assert toy.trainer.learning_rate == 0.5


def test_without_multiples_there_is_one_group_and_the_same_run():
    toy, plain = made(learning_rates={"head": 1.0}), made()
    assert len(plain.optimizer.param_groups) == 1 and "lr_scale" not in plain.optimizer.param_groups[0]
    for each in (toy, plain):
        each.fit([1], ToyTrainLoader(3))
    assert all(torch.equal(value, state(plain)[name]) for name, value in state(toy).items())


def test_fused_optimizers_stay_fused():
    toy = made(opt_class=partial(torch.optim.AdamW, lr=0.1), learning_rates={"head": 3})
    assert len(toy.optimizer.param_groups) == 2 and all(group["fused"] for group in toy.optimizer.param_groups)


def test_vectors_without_weight_decay_have_their_multiples_too():
    modules = layers()
    toy = brain(ToyBrain, partial(torch.optim.AdamW, lr=0.1, weight_decay=0.3), modules=modules,
                hparams={"learning_rates": {"model.2": 3}, "freeze": {"model.0": 5}}, remove_vector_weight_decay=True)
    toy.on_fit_start()
    groups = {(round(group["lr"], 3), group["weight_decay"]): len(group["params"])
              for group in toy.optimizer.param_groups}
    assert groups == {(0.1, 0.0): 2, (0.3, 0.0): 1, (0.1, 0.3): 3, (0.3, 0.3): 1}  # with those that thaw later


@pytest.mark.parametrize("of_a_part", [1, 4])
def test_lower_layers_learn_slower_times_the_factor_of_their_part(of_a_part):
    found = rates(made(Deep, deep(), layer_decay=0.5, learning_rates={"model.1.0": of_a_part}))
    assert {name: value for name, value in found.items() if name.endswith("weight")} == pytest.approx({
        "model.0.weight": 0.0125, "model.1.1.weight": 0.025, "model.1.0.weight": 0.05 * of_a_part,
        "model.1.2.weight": 0.1, "model.2.weight": 0.1})


def test_finding_the_order_of_layers_changes_nothing():
    torch.manual_seed(3)
    toy = made(Deep, deep(), layer_decay=0.5)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    plain = made(Deep, deep())
    assert torch.equal(drawn, torch.rand(1)) and all(p.grad is None for p in toy.modules.parameters())
    assert all(torch.equal(value, state(plain)[name]) for name, value in state(toy).items())


class Flat(Deep):
    def compute_forward(self, batch, stage):
        return ToyBrain.compute_forward(self, batch, stage)


@pytest.mark.parametrize("cls", [ToyBrain, Flat])
def test_layer_decay_is_refused_if_the_order_is_unknown_or_no_layers_repeat(cls):
    with refused("no-layer-order", key="layer_decay"):
        made(cls, layer_decay=0.5)


class Own(ToyBrain):
    def init_optimizers(self):
        self.optimizer = SGD(self.modules.parameters())


@pytest.mark.parametrize("hparams", [{"learning_rates": {"head": 2}}, {"layer_decay": 0.9}])
def test_factors_are_refused_with_a_recipes_own_optimizers(hparams):
    with refused("own-optimizers"):
        made(Own, **hparams)


def trained(folder, factor, epochs):
    counter = EpochCounter(epochs)
    modules = layers()
    toy = brain(modules=modules, hparams={"learning_rates": {"model.2": factor}},
                checkpointer=Checkpointer(folder, {"counter": counter, "model": modules}), ckpt_interval_steps=3)
    toy.fit(counter, ToyTrainLoader(3))
    toy.checkpointer.wait()
    return toy


def test_a_resumed_run_has_the_factors_of_its_present_recipe(tmp_path):
    whole = trained(tmp_path / "whole", 3.0, 2)
    trained(tmp_path / "cut", 3.0, 1)
    again = trained(tmp_path / "cut", 3.0, 2)
    assert all(torch.equal(value, state(again)[name]) for name, value in state(whole).items())
    other = trained(tmp_path / "cut", 5.0, 3)
    assert [group["lr_scale"] for group in other.optimizer.param_groups] == [1.0, 5.0]
    assert [group["name"] for group in other.optimizer.param_groups] == ["model x 1", "model x 5"]
