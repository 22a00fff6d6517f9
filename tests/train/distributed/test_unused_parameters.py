"""Ranks agree in the first step on what a backward reaches, and go on right where that changes."""

from __future__ import annotations

import logging

import pytest
import torch
from processes import results
from toys import ToyBrain, ToyTrainLoader, brain, furthest, layers, state

from sbkit.train.distributed import ranks

pytestmark = pytest.mark.slow
SEARCHING = {"find_unused_parameters": True}


def trained(cls, options, micros=1, epochs=2):
    """Weights, whether ranks agree in each step, warnings, and what the optimizer holds."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("sbkit").addHandler(handler)
    toy = brain(cls, modules=layers(), **options)
    rank, world = ranks.rank(), ranks.world_size()
    toy.fit(range(1, epochs + 1), ToyTrainLoader(6, 8, rank, world, micros))
    kept = {name: tensor.cpu() for name, tensor in state(toy).items()}
    left = toy.optimizer.state_dict()
    return kept, toy.trainer.parallel.exchange.agree_each_time, [line for line in said if "uses other" in line], \
        (sorted(left["state"]), left["param_groups"][0]["params"])


@pytest.mark.parametrize("micros", [1, 3])
def test_after_the_first_step_nothing_is_agreed_on_and_weights_are_the_same(micros):
    (first, agrees, said, left), (second, *_) = results(trained, ToyBrain, {}, micros)
    (expected, always, _, kept), _ = results(trained, ToyBrain, SEARCHING, micros)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert furthest(first, expected) == 0.0 and left == kept and not said and always and not agrees
    assert torch.equal(first["model.3.weight"], layers()[3].weight)


class Drops(ToyBrain):
    """From the fourth step on a rank or the other leaves a layer out, which both know from the first step."""

    def compute_forward(self, batch, stage):
        if self.optimizer_step < 3 or (self.optimizer_step + ranks.rank()) % 3:
            return super().compute_forward(batch, stage)
        model = self.hparams.model
        return model[2](torch.tanh(model[0](batch.x))).squeeze(-1)


class Late(ToyBrain):
    """At some step the second rank reaches a layer that nobody knows from the first step, and does so from then on."""

    since = 3

    def compute_forward(self, batch, stage):
        found = super().compute_forward(batch, stage)
        if self.optimizer_step >= self.since and ranks.rank() == 1:
            found = found + self.hparams.model[3](torch.tanh(self.hparams.model[0](batch.x))).sum(-1)
        return found


def test_a_layer_that_one_rank_leaves_out_now_and_then_is_trained_as_with_the_search():
    (first, agrees, said, _), (second, _, unsaid, _) = results(trained, Drops, {})
    (expected, *_), _ = results(trained, Drops, SEARCHING)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert agrees and len(said) == 1 and not unsaid
    assert furthest(first, expected) < 1e-6


class LateOnACard(Late):
    """What a step tells is known when the next one is done."""

    since = 2

    def on_stage_start(self, stage, epoch=None):
        self.trainer.arriving.lag = 1


@pytest.mark.parametrize("cls", [Late, LateOnACard])
def test_a_layer_that_is_reached_later_is_noticed_and_trained_from_then_on(cls):
    (first, agrees, said, _), (second, *_) = results(trained, cls, {})
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert agrees and len(said) == 1
    assert not torch.equal(first["model.3.weight"], layers()[3].weight)


class TwoNames(ToyBrain):
    """Nothing reaches a weight that two layers share, such as that of an embedding and its output layer."""

    def __init__(self, modules, *args, **kwargs):
        shared = torch.nn.Linear(8, 3)
        shared.weight = modules["model"][3].weight
        super().__init__({**modules, "shared": shared}, *args, **kwargs)


def test_what_two_unreached_layers_share_is_not_waited_for():
    (first, agrees, said, _), (second, *_) = results(trained, TwoNames, {})
    assert all(torch.equal(first[name], second[name]) for name in first) and not agrees and not said


@pytest.mark.gpu(cards=2)
def test_the_same_on_two_gpus():
    (first, agrees, *_), (second, *_) = results(trained, ToyBrain, {"device": "cuda"})
    (expected, *_), _ = results(trained, ToyBrain, {"device": "cuda", **SEARCHING})
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert furthest(first, expected) < 1e-5 and not agrees
