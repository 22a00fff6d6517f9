"""Two gloo processes train what one process trains, and stay equal, however a recipe reaches its layers."""

from __future__ import annotations

import os
import random
import tempfile
from functools import partial

import numpy as np
import pytest
import torch
from processes import outcomes, results
from speechbrain.dataio.sampler import DistributedSamplerWrapper
from speechbrain.processing.features import InputNormalization
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from toys import ToyBrain, ToyEvalLoader, ToyTrainLoader, brain, furthest, layers, state

from sbkit.errors import SbkitError
from sbkit.nn.accelerate import accelerate
from sbkit.nn.spec_augment import SpecAugment
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks
from sbkit.train.distributed.ranks import PeerFailed

pytestmark = pytest.mark.slow


def train(micros, steps=6, size=7, epochs=2):
    toy = brain(max_grad_norm=1.0)
    rank, world = ranks.rank(), ranks.world_size()
    train_set = ToyTrainLoader(steps, size, rank, world, micros)
    toy.fit(range(1, epochs + 1), train_set, ToyEvalLoader(11, rank, world))
    return state(toy), toy.ends


@pytest.fixture(scope="module")
def alone():
    return train(micros=1)


@pytest.mark.parametrize("micros, world", [(1, 2), (2, 2), (4, 2), (1, 3)])
def test_any_number_of_ranks_and_micro_batches_trains_the_same(alone, micros, world):
    (first, ends), *others = results(train, micros, world=world)
    for other, other_ends in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
        assert other_ends == ends
    assert furthest(first, alone[0]) < 1e-5
    assert [stage for stage, _ in ends] == ["TRAIN", "VALID"] * 2
    assert [loss for _, loss in ends] == pytest.approx([loss for _, loss in alone[1]], rel=1e-5)


class Small(ToyBrain):
    """Its gradients are small enough for fp16's first loss scale."""

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        return loss._replace(total=loss.total / 20)


def train_in_fp16(micros):
    toy = brain(Small, partial(torch.optim.SGD, lr=0.5), precision="fp16")
    rank, world = ranks.rank(), ranks.world_size()
    toy.fit([1], ToyTrainLoader(6, 40, rank, world, micros))
    return state(toy), toy.scaler.state_dict(), toy.ends


def test_the_same_holds_in_fp16_whose_loss_scale_all_ranks_share():
    expected, _, ends = train_in_fp16(1)
    (first, scale, _), (second, other, other_ends) = results(train_in_fp16, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert scale == other and scale["scale"] == 65536.0 and scale["sum_scale"] in (2.0**-6, 2.0**-7)  # of some 60
    assert furthest(first, expected) < 0.01 and other_ends[0][1] == pytest.approx(ends[0][1], rel=0.01)


class Gan(ToyBrain):
    """Two optimizers and a fit_batch of its own, with accumulation under no_sync."""

    def init_optimizers(self):
        make = partial(torch.optim.SGD, lr=0.02)
        self.g, self.d = make(self.modules.model[:2].parameters()), make(self.modules.model[2:].parameters())
        self.optimizers_dict = {"g": self.g, "d": self.d}

    def fit_batch(self, batch):
        loss = None
        for optimizer, sign in ((self.d, 1.0), (self.g, -0.1)):
            for half, last in ((0, False), (1, True)):
                with self.no_sync(not last):
                    part = batch.x[half::2]
                    hidden = self.modules.model[1].project(torch.tanh(self.modules.model[0](part)))
                    loss = sign * self.modules.model[2](hidden).square().sum()
                    loss.backward()
            optimizer.step()
            self.g.zero_grad()
            self.d.zero_grad()
        self.optimizer_step += 1
        return loss.detach().cpu()


def train_gan(world):
    rank = ranks.rank()
    toy = brain(Gan)
    toy.fit(range(1, 3), ToyTrainLoader(4, 8, rank, world))
    return state(toy)


def test_a_fit_batch_of_a_recipe_s_own_keeps_ranks_equal_and_averages_gradients():
    first, second = results(train_gan, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)

    class Reference(Gan):  # the mean over ranks is half the sum over all rows
        def fit_batch(self, batch):
            for optimizer, sign in ((self.d, 1.0), (self.g, -0.1)):
                hidden = self.modules.model[1].project(torch.tanh(self.modules.model[0](batch.x)))
                (sign * self.modules.model[2](hidden).square().sum() / 2).backward()
                optimizer.step()
                self.g.zero_grad()
                self.d.zero_grad()
            return torch.zeros(())

    toy = brain(Reference)
    toy.fit(range(1, 3), ToyTrainLoader(4, 8))
    assert furthest(first, state(toy)) < 1e-5


class Warming(ToyBrain):
    """One of two optimizers rests for two steps, and its gradients add up."""

    def init_optimizers(self):
        make, model = partial(torch.optim.SGD, lr=0.01), self.modules.model
        self.optimizers_dict = {"a": make(model[:2].parameters()), "b": make(model[2:].parameters())}

    def freeze_optimizers(self, optimizers):
        return {"b": optimizers["b"]} if self.optimizer_step < 2 else optimizers


class OwnLoop(ToyBrain):
    def _fit_train(self, train_set, epoch, enable):
        for self.step, batch in enumerate(train_set.at(epoch), 1):
            self.fit_batch(batch)


def train_as(cls, cards=1):
    toy = brain(cls, partial(torch.optim.SGD, lr=0.01), max_grad_norm=-1)
    toy.fit([1], ToyTrainLoader(4, 8, ranks.rank(), ranks.world_size(), cards // ranks.world_size()))
    return state(toy)


@pytest.mark.parametrize("cls", [Warming, OwnLoop])
def test_frozen_optimizers_and_a_loop_of_a_script_s_own_train_on_two_ranks_as_on_one(cls):
    first, second = results(train_as, cls, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert furthest(first, train_as(cls, 2 if cls is OwnLoop else 1)) < 1e-4


class Masking(ToyBrain):
    """Rows are masked by torch and by numpy, and a layer is left out by Python."""

    def compute_forward(self, batch, stage):
        if stage.name == "TRAIN":
            ones = torch.ones(1, 20, 40)
            masks = (SpecAugment(fill="zero")(ones), torch.nn.functional.dropout(ones), torch.tensor(np.random.rand(9)))
            self.masks = [*getattr(self, "masks", []), *masks]
            self.left_out = [*getattr(self, "left_out", []), random.random() < 0.5]
        return super().compute_forward(batch, stage)


def train_masked(seed):
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    toy = brain(Masking)
    toy.fit([1], ToyTrainLoader(4, 8, ranks.rank(), ranks.world_size()))
    return toy.masks, toy.left_out, state(toy)


def test_ranks_draw_their_own_masks_but_pythons_decisions_are_the_same():
    (first, decided, weights), (second, also, others) = results(train_masked, 3)
    assert decided == also and all(torch.equal(weights[name], others[name]) for name in weights)
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))


class LegacyBrain(ToyBrain):
    """SpeechBrain's way: a dataset, a scalar loss."""

    def compute_forward(self, batch, stage):
        self.seen = [*getattr(self, "seen", []), *([float(batch[0, 0])] if stage.name == "VALID" else [])]
        return self.modules.model[2](torch.tanh(self.modules.model[0](batch)))

    def compute_objectives(self, predictions, batch, stage):
        return (predictions.squeeze(-1) - batch.sum(-1)).square().mean()


class Listing(LegacyBrain):
    def compute_forward(self, batch, stage):
        torch.rand(1 + ranks.rank())  # whatever each rank draws, all see one order
        self.seen = [*getattr(self, "seen", []), *(10 * batch[:, 0]).round().int().tolist()]
        return super().compute_forward(batch, stage)


def shuffled(ready):
    data = [torch.tensor([float(i)] * 6) / 10 for i in range(12)]
    sampler = RandomSampler(data)
    toy = brain(Listing, hparams={"seed": 7})
    if ready:
        toy.fit([1, 2], DataLoader(data, sampler=DistributedSamplerWrapper(sampler, shuffle=False)))
    else:
        toy.fit([1, 2], data, train_loader_kwargs={"sampler": sampler})
    return toy.seen


@pytest.mark.parametrize("ready", [False, True])
def test_shares_of_an_order_drawn_at_random_hold_all_of_it_once(ready):
    first, second = results(shuffled, ready)
    epochs = [first[:6] + second[:6], first[6:] + second[6:]]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs) and epochs[0] != epochs[1]


class Drifting(ToyBrain):
    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if ranks.rank() == 1 and self.optimizer_step == self.hparams.drift_at:
            weight = self.modules.model[1].weight
            with torch.no_grad():
                weight.copy_(weight.flip(0) if self.hparams.swaps else weight + 1e-6)


def drift(at, swaps):
    toy = brain(Drifting, hparams={"drift_at": at, "swaps": swaps})
    toy.fit(range(1, 3), ToyTrainLoader(3, 7, ranks.rank(), 2))


@pytest.mark.parametrize("at, when", [(1, "after the first step"), (2, "after epoch 1")])
@pytest.mark.parametrize("swaps", [False, True], ids=["other values", "other places"])
def test_ranks_that_differ_end_the_run_and_name_the_parameter(at, when, swaps):
    first, second = outcomes(drift, at, swaps)
    assert isinstance(first.error, SbkitError) and first.error.exit_code == 1
    assert "'model.1.weight'" in str(first.error) and when in str(first.error)
    assert isinstance(second.error, PeerFailed) and second.error.code == 1


class WithBuffer(nn.Module):
    """Counts what it has seen, which differs between ranks."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 1)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().sum(0)
        return self.lin(self.norm(x)).squeeze(-1)


class BufferBrain(ToyBrain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch.x)


def train_buffers():
    toy = brain(BufferBrain, modules=WithBuffer())
    toy.fit(range(1, 3), ToyTrainLoader(3, 8, ranks.rank(), ranks.world_size()))
    return state(toy), toy.trainer.buffers.changing, statistics(ranks.rank(), ranks.world_size())


def statistics(rank, world):
    """What a normaliser has counted of four batches; the last share of the third is a stand-in."""
    norm = InputNormalization()
    accelerate(norm)
    lengths = torch.tensor([0.2, 1.0, 0.5, 0.9, 0.7])
    for seed in range(4):
        x = seed + (1 + seed) * torch.randn(5, 30, 4, generator=torch.Generator().manual_seed(seed))
        x[3:] += 5
        if seed == 2 and rank:
            norm.counting(100 * torch.randn(1, 7, 4), None, torch.tensor([False]))
        elif world > 1:
            share = slice(3, 5) if rank else slice(0, 3)
            norm(x[share], lengths[share])
        else:
            counted = 3 if seed == 2 else 5
            norm(x[:counted], lengths[:counted])
    return float(norm.count), norm.glob_mean, norm.glob_std


def test_buffers_that_training_writes_stay_equal():
    (first, changing, counted), (second, _, others) = results(train_buffers)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["model.seen"].abs().sum() > 0
    assert "model.table" not in changing and "model.norm.running_mean" in changing
    # A normaliser's statistics are no buffers: each rank has those of all frames.
    for one, other, alone in zip(counted, others, statistics(0, 1), strict=True):
        torch.testing.assert_close(one, alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class LateBrain(BufferBrain):
    """A buffer that only rank 1 writes to, from the third step on, by some way or another."""

    def compute_forward(self, batch, stage):
        if stage.name == "TRAIN" and self.optimizer_step >= 2 and ranks.rank() == 1:
            table = self.modules.model.table
            (table.data if self.hparams.hidden else table).add_(1.0)
        return super().compute_forward(batch, stage)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.tables = [*getattr(self, "tables", []), float(self.modules.model.table[0])]

    def _save_intra_epoch_ckpt(self):
        self.saved = float(self.modules.model.table[0])


def train_late(hidden, every, folder):
    toy = brain(LateBrain, modules=WithBuffer(), hparams={"hidden": hidden}, ckpt_interval_steps=every,
                checkpointer=Checkpointer(folder))
    toy.fit([1], ToyTrainLoader(6, 8, ranks.rank(), ranks.world_size()))
    return state(toy), toy.tables, getattr(toy, "saved", None)


@pytest.mark.parametrize("hidden, every, known_after", [(False, 4, 4), (True, 4, 4), (False, 0, 6)])
def test_a_buffer_that_changes_in_mid_epoch_is_noticed_there(tmp_path, hidden, every, known_after):
    """At the next checkpoint, or when the epoch ends."""
    (first, _, saved), (second, tables, other) = results(train_late, hidden, every, tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert saved == other == (0.0 if every else None)
    assert tables[2] == 1.0 and max(tables) == max(1.0, known_after - 2.0)
    assert tables[-1] == (4.0 if known_after == 6 else 1.0)


def evaluate():
    toy = brain()
    rank, world = ranks.rank(), ranks.world_size()
    loss = toy.evaluate(ToyEvalLoader(11, rank, world))
    return loss, toy.gather([id for batch in ToyEvalLoader(11, rank, world) for id in batch.ids])


def test_uneven_shares_of_an_evaluation_give_the_exact_mean_and_every_row_once():
    expected, _ = evaluate()
    for loss, ids in results(evaluate, world=3):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert sorted(ids) == list(range(11))


def legacy(world, share):
    toy = brain(LegacyBrain, hparams={"share_validation": share}, grad_accumulation_factor=2)
    data = [torch.tensor([float(i)] * 6) / 10 for i in range(10)]
    one = {"batch_size": 1}
    toy.fit(range(1, 3), data, data[:5], train_loader_kwargs=one, valid_loader_kwargs=one)
    return state(toy), toy.ends, toy.optimizer_step, toy.seen


def test_plain_datasets_are_trained_in_shares_and_their_last_accumulation_is_a_step():
    (first, ends, steps, seen), (second, _, _, other_seen) = results(legacy, 2, False)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert steps == 6  # 5 batches a rank: two steps of 2, one of 1, twice
    assert seen == other_seen and len(seen) == 10  # validated whole on each rank, as in SpeechBrain
    (_, shared_ends, _, seen), (_, _, _, other_seen) = results(legacy, 2, True)
    assert sorted([*seen[:3], *other_seen[:2]]) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert shared_ends[1][1] == pytest.approx(ends[1][1], rel=1e-5)


def stderr_of_training():
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            toy = brain(AllReached, modules=layers()[:3])
            toy.fit(range(1, 2), ToyTrainLoader(2, 4, ranks.rank(), ranks.world_size()))
        finally:
            os.dup2(stderr, 2)
        file.seek(0)
        return file.read().decode()


class AllReached(ToyBrain):
    def compute_forward(self, batch, stage):
        os.write(2, b"from the recipe\n")
        return super().compute_forward(batch, stage)


def test_ddp_does_not_advise_to_stop_searching_for_unused_parameters():
    for text in results(stderr_of_training):
        assert "find_unused_parameters" not in text and "from the recipe" in text
