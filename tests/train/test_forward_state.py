"""A step that is skipped leaves nothing behind in buffers, statistics and averages."""

from __future__ import annotations

import math

import pytest
import torch
from host_syncs import HostSyncs
from speechbrain.processing.features import GlobalNorm, InputNormalization
from torch import nn
from toys import SIZE, ToyBrain, ToyTrainLoader, brain, state

from sbkit.train import forward_state
from sbkit.train.averaging import EMA
from sbkit.train.forward_state import ForwardState

YES, NO = torch.ones(()), torch.zeros(())


class Writing(nn.Module):
    """Writes to buffers in every way there is."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(SIZE)
        self.codes = nn.Parameter(torch.zeros(SIZE))
        self.register_buffer("seen", torch.zeros(SIZE))
        self.register_buffer("behind", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("expanded", torch.ones(1).expand(5))
        self.grow = InputNormalization(update_until_epoch=None)

    def forward(self, x):
        x = self.grow(x.unsqueeze(1)).squeeze(1)
        self.seen += 1.0 + x.detach().sum(0)
        self.behind.data.add_(1.0 + float(x.detach().sum()))
        self.replaced = self.replaced + 1.0 + x.detach().mean()
        self.count += 1
        return self.norm(x + self.codes).sum(-1)


def everything(module):
    norm = module.grow
    values = {**dict(module.named_buffers()), "mean": norm.glob_mean, "std": norm.glob_std}
    return {**{name: value.clone() for name, value in values.items()}, "samples": torch.as_tensor(norm.count)}


def unequal(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("steps_before", [0, 2])
def test_state_that_a_forward_wrote_is_restored_if_the_step_was_skipped(steps_before):
    torch.manual_seed(0)
    module = Writing()
    kept = ForwardState(module)
    for _ in range(steps_before):
        kept.save()
        module(torch.randn(3, SIZE))
        kept.restore(NO)
    before = everything(module)
    kept.save()
    module(torch.full((3, SIZE), math.nan))
    kept.restore(YES)
    assert unequal(before, everything(module)) == []
    kept.save()
    module(torch.randn(3, SIZE))
    after = everything(module)
    kept.restore(NO)
    assert unequal(after, everything(module)) == []
    assert {"norm.running_mean", "seen", "behind", "replaced", "count", "mean", "std", "samples"} <= set(
        unequal(before, after))
    kept.restore(YES)  # nothing was kept since
    assert unequal(after, everything(module)) == []


def test_state_can_always_be_restored():
    module = Writing()
    kept, before = ForwardState(module), everything(module)
    marks = module.table._version
    kept.save()
    module(torch.randn(3, SIZE))
    kept.restore()
    assert unequal(before, everything(module)) == [] and module.table._version == marks


def test_speechbrains_global_norm_which_replaces_its_buffers():
    norm = GlobalNorm(length_dim=1)
    kept = ForwardState(norm)
    norm(torch.randn(2, 5, 3), torch.ones(2))
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    kept.save()
    norm(torch.full((2, 5, 3), math.nan), torch.ones(2))
    kept.restore(YES)
    assert unequal(before, dict(norm.named_buffers())) == []


def test_large_tables_are_not_copied_again_until_they_change(monkeypatch):
    monkeypatch.setattr(forward_state, "SMALL", 3)
    module = nn.Module()
    module.register_buffer("table", torch.arange(4.0))
    module.register_buffer("code", torch.zeros(4))
    kept = ForwardState(module)

    def copied():
        return sum(view.numel() for group in kept._groups for view in group.before.values())

    def step(skipped):
        kept.save()
        module.code += 1
        kept.restore(skipped)

    step(NO)
    assert copied() == 8 and not kept.found_new_buffers
    step(YES)
    assert copied() == 4 and module.code.tolist() == [1.0] * 4
    module.table += 1  # from here on it is one that changes
    step(NO)
    assert copied() == 8


def test_a_buffer_that_is_written_to_for_the_first_time_later_on_is_noticed():
    module = nn.Module()
    module.register_buffer("late", torch.zeros(4))
    kept, noticed = ForwardState(module), []
    for step in range(4):
        kept.save()
        if step >= 2:
            module.late += 1
        kept.restore(NO)
        noticed.append(kept.found_new_buffers)
    assert noticed == [False, False, True, False]


def test_nothing_waits_for_the_device():
    module = nn.Sequential(nn.Linear(SIZE, 4), nn.BatchNorm1d(4))
    kept = ForwardState(module)
    x = torch.randn(3, SIZE)
    kept.save(), module(x), kept.restore(NO)
    with HostSyncs() as syncs:
        kept.save(), module(x), kept.restore(NO)
    assert syncs.found == []


class Normed(ToyBrain):
    """A model with statistics; remembers them, and the averages, before and after each step."""

    def compute_forward(self, batch, stage):
        return self.modules.model(batch.x)

    def look(self):
        averages = {name: value.clone() for name, value in self.trainer.ema.state_dict()["weights"].items()}
        return {**everything(self.modules.model), **averages}

    def on_fit_batch_start(self, batch, should_step):
        if batch.micro == 0:
            self.before = self.look()

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if should_step:
            self.changed = [*getattr(self, "changed", []), unequal(self.before, self.look()) if self.before else None]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_skipped_step_of_a_run_leaves_no_trace(tmp_path, precision):
    def touch(batch):
        if batch.step == 2 and batch.micro == 0:
            batch.x[0, 0] = math.nan

    model = Writing()
    toy = brain(Normed, modules=model, hparams={"ema": EMA(model, 0.9), "output_folder": str(tmp_path)},
                precision=precision)
    toy.fit(range(1, 2), ToyTrainLoader(5, 6, micros=2, touch=touch))
    assert toy.changed[2] == []
    for step in (1, 3, 4):
        assert {"norm.running_var", "mean", "codes"} <= set(toy.changed[step])
    assert all(torch.isfinite(value).all() for value in [*state(toy).values(), *toy.look().values()])
    assert toy.look()["count"] == 2 * 4
