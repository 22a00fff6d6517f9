"""Steps of each task compute the same when they are replayed as graphs: nothing that changes stands still in one."""

import logging
from types import SimpleNamespace

import encoders
import numpy as np
import pytest
import replayed
import torch
from test_padded_rows import HPARAMS, RECIPES, SECONDS, manifest, overrides  # noqa: F401  # a fixture
from toys import furthest, state

from sbkit.data.columns import BatchColumns
from sbkit.data.reader import Reader, ReadRequest
from sbkit.data.shapes import Shape
from sbkit.recipe import load

#: What draws random numbers, warms up or takes turns.
MORE = {"dropout": 0.1, "spec_augment.ramp": [0.6, 1.0], "ema_decay": 0.9}
STEPS = 6


class Loader:
    """Steps of two micro-batches, each with other recordings of the five."""

    def __init__(self, rows, brain):
        tokens = SimpleNamespace(encode=lambda text: [3 + ord(letter) % 20 for letter in text])
        self.reader = Reader(rows, tokens if type(brain).needs_text() else None,
                             columns=BatchColumns(brain.columns, brain.keys))

    def steps(self, epoch):
        return STEPS

    def at(self, epoch, step=0):
        for i in range(step, STEPS):
            for micro in range(2):
                rows = np.roll(np.arange(len(SECONDS)), i)[:3 + (i + micro) % 2]
                yield self.reader.read(ReadRequest(1, i, micro, 2, rows, shape=Shape(6, 1.6, 24)))


def trained(given, recipe, rows, folder, wanted):
    torch.manual_seed(1)
    given = {**given, "graphs": wanted}
    hparams = load.load(HPARAMS / recipe, overrides({**given, "output_folder": str(folder)}))
    brain = hparams["brain"](hparams["modules"], hparams["opt_class"], hparams,
                             {"device": "cpu", "noprogressbar": True})
    brain.dummy_batch(1, 1.0)  # lets GlobalNorm do without statistics
    losses = []
    brain.on_step_known = lambda result: losses.append(result.loss)
    if brain.schedule is not None:
        brain.schedule.total_steps = STEPS
    torch.manual_seed(2)
    brain.fit(range(1, 2), Loader(rows, brain))
    return brain, losses


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "CTC" else pytest.param(name, marks=pytest.mark.long)
                                  for name in RECIPES])
def test_a_replayed_task_learns_the_same(name, manifest, tmp_path, monkeypatch, caplog):  # noqa: F811
    caplog.set_level(logging.INFO, "sbkit.train.graphs")
    replayed.on_cpu(monkeypatch)
    recipe, given = RECIPES[name]
    if name == "finetune":
        given = {"encoder_source": str(encoders.make(tmp_path / "source"))}
    elif name not in ("enhancement", "codec"):
        given = {**given, **MORE}
    (one, losses), (other, plain) = (trained(given, recipe, manifest, tmp_path / "run", wanted)
                                     for wanted in (True, False))
    said = [record.getMessage() for record in caplog.records if "captured" in record.getMessage()]
    assert set(one.trainer.runner.nodes) == {"micro-step", "update"}, said
    assert losses == pytest.approx(plain, rel=1e-5), said
    assert furthest(state(one), state(other)) < 1e-5
