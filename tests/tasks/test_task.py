"""What every task has from its base class, whatever it is trained for."""

import pytest
import torch
from speechbrain.core import Stage
from torch.utils.data import IterableDataset

from sbkit.errors import SbkitError
from sbkit.tasks.task import Task
from sbkit.train import loaders
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks


class Sums(Task):
    """Two layers, each of which the checkpointer knows by its own name."""

    def compute_forward(self, batch, stage):
        return self.modules.head(self.modules.encoder(batch))

    def compute_objectives(self, outputs, batch, stage):
        return outputs.sum()


def test_the_mean_of_checkpoints_is_tested_whatever_the_weights_are_called(tmp_path):
    parts = {"encoder": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)}
    brain = Sums(parts, hparams={"average_checkpoints": 2}, run_opts={"device": "cpu"},
                 checkpointer=Checkpointer(tmp_path, parts))
    for loss in (4.0, 1.0, 2.0):
        for parameter in brain.modules.parameters():
            parameter.data.fill_(loss)
        brain.checkpointer.save_checkpoint(meta={"loss": loss})
    brain.checkpointer.wait()
    brain.on_evaluate_start(**brain.metric.order)
    assert all(torch.equal(parameter, torch.full_like(parameter, 1.5)) for parameter in brain.modules.parameters())


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1, 2])


def test_ranks_share_an_ordinary_dataset_so_that_no_row_is_counted_twice(monkeypatch):
    brain = Sums({"head": torch.nn.Linear(2, 1)}, run_opts={"device": "cpu"})
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    evaluated = []
    for rank in range(2):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        evaluated += map(float, loaders.made(brain, [0.0, 1.0, 2.0, 3.0, 4.0], Stage.VALID, {"batch_size": 1}))
    assert sorted(evaluated) == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(SbkitError, match="can't be divided over ranks"):
        loaders.made(brain, Stream(), Stage.VALID, {})
