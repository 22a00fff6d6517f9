"""What a run asks of its loaders: counts that outlive it, labels that are looked at before anything is made of them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from refusals import refused
from toys import ToyBrain, ToyEvalLoader, ToyTrainLoader, brain, load, save

from sbkit.compat import loaders
from sbkit.errors import SbkitError
from sbkit.nn import guard
from sbkit.train.checkpoint import Checkpointer


class Counting(ToyTrainLoader):
    """Every row with an odd number is damaged."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts = {"read": 0, "failed": 0, "damaged": {}}

    def at(self, epoch, step=0):
        for batch in super().at(epoch, step):
            self.counts["read"] += len(batch.ids)
            self.counts["failed"] += sum(i % 2 for i in batch.ids)
            self.counts["damaged"].update({str(i): "odd" for i in batch.ids if i % 2})
            yield batch

    def state_dict(self):
        return self.counts

    def load_state_dict(self, state):
        self.counts = state


def test_a_resumed_run_keeps_the_count_of_damaged_recordings(tmp_path):
    def run(loader, **run_opts):
        toy = brain(checkpointer=Checkpointer(tmp_path), **run_opts)
        toy.fit([1], loader)
        toy.checkpointer.wait()

    run(first := Counting(4, 6), optimizer_step_limit=2, ckpt_interval_steps=2)
    assert first.counts["read"] == 12
    run(second := Counting(4, 6))
    assert second.counts["read"] == 24 and second.counts["failed"] == 12 == len(second.counts["damaged"])


@pytest.mark.parametrize("world", [1, 3])
def test_on_another_number_of_ranks_the_counts_are_divided(tmp_path, monkeypatch, world):
    saved = [{"read": 10, "failed": 3, "damaged": {"a": "cut"}}, {"read": 7, "failed": 2, "damaged": {"b": "gone"}}]
    monkeypatch.setattr(loaders.ranks, "gather_objects", lambda obj: saved)
    save(loaders.LoaderCounts(Counting()), tmp_path / "counts")
    monkeypatch.setattr(loaders.ranks, "world_size", lambda: world)
    found = []
    for rank in range(world):
        monkeypatch.setattr(loaders.ranks, "rank", lambda rank=rank: rank)
        load(loaders.LoaderCounts(loader := Counting()), tmp_path / "counts", True)
        found.append(loader.counts)
    assert sum(each["read"] for each in found) == 17 and sum(each["failed"] for each in found) == 5
    assert all(each["damaged"] == {"a": "cut", "b": "gone"} for each in found)


class Late(guard.Peek):
    """What a device has not computed yet."""

    ready = False


class BadLabel(ToyBrain):
    """A device finds a label outside its table in the last batch of a stage; nobody could have read it so far."""

    def compute_forward(self, batch, stage):
        if stage.name == self.hparams.stage and self.step == self.hparams.batch:
            tokens = guard.IndexTable("tokens", 28, [f"clip{batch.ids[0]}"])
            with mock.patch.object(guard, "Peek", Late):
                guard.guard_on_device(torch.tensor([[99]]), tokens, None)
        return super().compute_forward(batch, stage)


@pytest.mark.parametrize("stage, batch, ends", [("TRAIN", 3, []), ("VALID", 2, ["TRAIN"]), ("TEST", 2, [])])
def test_a_bad_label_in_the_last_batch_is_an_error_before_it_is_used(stage, batch, ends):
    toy = brain(BadLabel, hparams={"stage": stage, "batch": batch})
    with pytest.raises(SbkitError, match=r"clip.*index 99 is outside the table of 28"):
        toy.evaluate(ToyEvalLoader(4)) if stage == "TEST" else toy.fit([1], ToyTrainLoader(3), ToyEvalLoader(4))
    assert [name for name, _ in getattr(toy, "ends", [])] == ends and guard.pending() == 0


class LooksPlanned:
    """A batch that says where its step ends, of a class that nobody reads that of."""

    def __init__(self, batch):
        self.x, self.tokens, self.last = batch.x, batch.tokens, True


class OfAnotherClass(ToyTrainLoader):
    def at(self, epoch, step=0):
        return map(LooksPlanned, super().at(epoch, step))


def test_a_plan_whose_batches_are_of_another_class_is_refused():
    with refused("batch-without-plan"):
        brain().fit([1], OfAnotherClass(2))
