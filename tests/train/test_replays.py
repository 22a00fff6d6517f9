"""Steps that are replayed compute what steps compute, also where there is no card."""

import logging
from functools import partial

import pytest
import replayed
import torch
from toys import ToyTrainLoader, brain, furthest, layers, state

from sbkit.train.averaging import EMA
from sbkit.train.muon import Muon


@pytest.mark.parametrize("micros", [1, 3])
def test_replays_compute_what_steps_compute(micros, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "sbkit.train.graphs")
    replayed.on_cpu(monkeypatch)
    found = []
    for wanted in (True, False):
        model = layers()
        optimizer = partial(Muon, lr=0.01, modules=[model[0], model[2]], orthogonalize_every=3)
        toy = brain(modules=model, opt_class=optimizer, hparams={"graphs": True, "ema": EMA(model)})
        if wanted:
            replayed.replaying(toy)
        toy.fit(range(1, 2), ToyTrainLoader(steps=11, size=9, micros=micros))
        assert set(toy.trainer.graphs.nodes) == ({"micro-step", "update"} if wanted else set()), caplog.text
        found.append(toy)
    assert furthest(*map(state, found)) < 1e-6
