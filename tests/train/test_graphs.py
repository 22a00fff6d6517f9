"""Steps that are captured as CUDA graphs: what they launch, what stays as without, and what can't be captured."""

import logging
import random
import re
import weakref
from functools import partial
from typing import ClassVar

import pytest
import torch
from processes import results
from speechbrain.utils.epoch_loop import EpochCounter
from torch import nn
from toys import ToyBrain, ToyTrainLoader, brain, furthest, layers, state

from sbkit.rehearsal import fake_gpu
from sbkit.train.averaging import EMA
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks
from sbkit.train.graphs import captured, recorder
from sbkit.train.muon import Muon

#: Launches of a captured step: of each micro-batch, and of its update.
MICRO, UPDATE = 4, 3


class Drops(ToyBrain):
    """With random numbers on the device."""

    def compute_forward(self, batch, stage):
        return super().compute_forward(batch, stage) * nn.functional.dropout(torch.ones_like(batch.x[:, 0]), 0.5)


def trained(cls=Drops, steps=8, micros=1, hparams=None, after=None, loader=None, **options):
    """A Brain that was trained on a card, and what the card was asked for in each step."""
    torch.manual_seed(0)
    toy = brain(cls, hparams={"graphs": True, **(hparams or {})}, **{"device": "cuda:0", **options})
    counts, train_step = [], toy.trainer.train_step

    def counted(micro_batches):
        before = fake_gpu.counters() if fake_gpu.active() else None
        more = train_step(micro_batches)
        if more and before:
            counts.append(fake_gpu.counters() - before)
        if after:
            after(toy)
        return more

    toy.trainer.train_step = counted
    toy.fit(range(1, 2), loader or ToyTrainLoader(steps=steps, size=8, micros=micros))
    return toy, counts


def launches(counts):
    return [count.launches for count in counts]


@pytest.fixture
def on_a_fake_gpu():
    if not fake_gpu.active():
        pytest.skip("launches are counted on a fake GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    {}, {"micros": 3}, {"precision": "fp16"}, {"precision": "bf16", "max_grad_norm": 1.0},
    {"opt_class": partial(torch.optim.SGD, lr=0.1)}], ids=str)
def test_a_captured_step_has_few_launches_and_waits_for_nothing(options, on_a_fake_gpu):
    _, counts = trained(steps=12, **options)
    _, plain = trained(steps=12, hparams={"graphs": False}, **options)
    micros = options.get("micros", 1)
    assert all(count.launches <= MICRO * micros + UPDATE for count in counts[4:]), launches(counts)
    assert not any(count.synchronisations or count.captures for count in counts[4:])
    assert min(launches(plain)) > 3 * max(launches(counts[4:])) and fake_gpu.errors() == []


def counters(toy):
    """What the host knows of a run, and where the device's random numbers are."""
    turns = [kept.get("turn") for kept in toy.optimizer.state.values()]
    average = toy.trainer.moving_average
    return (toy.optimizer_step, turns, average and average.updates, toy.nonfinite_count,
            torch.cuda.get_rng_state().tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("micros", [1, 2])
def test_counters_and_random_numbers_are_where_they_are_without_graphs(micros):
    found = []
    for wanted in (True, False):
        model = layers()
        optimizer = partial(Muon, lr=0.01, modules=[model[0], model[2]], orthogonalize_every=3)
        toy, _ = trained(micros=micros, modules=model, opt_class=optimizer, steps=11,
                         hparams={"graphs": wanted, "ema": EMA(model)})
        found.append(counters(toy))
    assert found[0] == found[1] and found[0][1] != []


class Died(Exception):
    pass


class Dies(Drops):
    def on_fit_batch_start(self, batch, should_step):
        if self.optimizer_step == self.hparams.die_at:
            raise Died


@pytest.mark.gpu
def test_a_run_that_died_is_where_one_that_did_not_is(tmp_path):
    def run(folder, die_at=None):
        torch.manual_seed(0)
        model, counter = layers(), EpochCounter(2)
        optimizer = partial(Muon, lr=0.01, modules=[model[0], model[2]], orthogonalize_every=3)
        toy = brain(Dies, modules=model, opt_class=optimizer, device="cuda:0", ckpt_interval_steps=4,
                    checkpointer=Checkpointer(folder, {"counter": counter, "model": model}),
                    hparams={"graphs": True, "die_at": die_at})
        try:
            toy.fit(counter, ToyTrainLoader(9, 8))
        finally:
            toy.checkpointer.wait()
        return toy

    whole = counters(run(tmp_path / "whole"))
    with pytest.raises(Died):
        run(tmp_path / "cut", die_at=6)
    assert counters(run(tmp_path / "cut")) == whole


@pytest.mark.gpu
def test_what_thaws_is_captured_too(on_a_fake_gpu):
    _, counts = trained(steps=14, hparams={"freeze": {"model.0": 6}})
    few = [count.launches <= MICRO + UPDATE and not count.captures for count in counts]
    assert few == [False, False, True, True, True, True, False, False, True, True, True, True, True, True]


class Waits(ToyBrain):
    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        loss.total.item()
        return loss


class Remembers(ToyBrain):
    seen = 0

    def compute_forward(self, batch, stage):
        self.seen += 1
        return super().compute_forward(batch, stage)


class Draws(ToyBrain):
    def compute_forward(self, batch, stage):
        return super().compute_forward(batch, stage) * random.uniform(0.9, 1.1)


class TooLarge(ToyBrain):
    def compute_forward(self, batch, stage):
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().compute_forward(batch, stage)


class Holds(ToyBrain):
    """Has too little memory to be captured."""

    captured: ClassVar[list[weakref.ref]] = []
    is_freed: ClassVar[list[bool]] = []

    def compute_forward(self, batch, stage):
        outputs = super().compute_forward(batch, stage)
        if torch.cuda.is_current_stream_capturing():
            self.captured.append(weakref.ref(outputs))
            raise torch.OutOfMemoryError("CUDA out of memory")
        if self.captured:
            self.is_freed.append(self.captured[0]() is None)
        return outputs


@pytest.mark.gpu
def test_what_a_capture_without_enough_memory_computed_is_freed_before_python_computes_it(monkeypatch):
    monkeypatch.setattr(Holds, "captured", [])
    monkeypatch.setattr(Holds, "is_freed", [])
    toy, _ = trained(Holds)
    assert len(Holds.captured) == 1 and Holds.is_freed[0] and toy.optimizer_step == 8


@pytest.mark.gpu
@pytest.mark.parametrize(("cls", "hparams", "limits", "reason"), [
    (Waits, {}, {}, r"called a synchronizing CUDA operation \(.*test_graphs.py:\d+\)"),
    (Remembers, {}, {}, "a step changes Remembers.seen, and a replay would not"),
    (Draws, {}, {}, "a step changes python's random numbers on the host"),
    (TooLarge, {}, {}, "cuda:0 has too little memory for them; a smaller max_batch_seconds leaves more"),
    (ToyBrain, {"graphs": None}, {}, "ToyBrain doesn't say that its steps can be replayed; `graphs: true` says so"),
    (ToyBrain, {}, {(recorder, "MAX_NODES"): 5}, r"the micro-step has \d+ nodes, and 5 are allowed"),
    (ToyBrain, {}, {(captured, "MAX_GRAPHS"): 1}, "batches have more than 1 shapes"),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_cannot_be_replayed_trains_without_graphs_and_says_why(cls, hparams, limits, reason, monkeypatch, caplog):
    for (module, name), limit in limits.items():
        monkeypatch.setattr(module, name, limit)
    caplog.set_level(logging.INFO, "sbkit.train.graphs")
    toy, _ = trained(cls, hparams=hparams, micros=3)
    said = [record.message for record in caplog.records if "not captured" in record.message]
    assert len(said) == 1 and toy.optimizer_step == 8
    assert re.search(reason, said[0]), said
    assert getattr(toy, "seen", 8 * 3) == 8 * 3  # trials leave nothing behind


class Longer(ToyTrainLoader):
    """Every fourth of its batches is larger than its shape."""

    def at(self, *place):
        for number, batch in enumerate(super().at(*place)):
            batch.beyond_shape = number % 4 == 3
            yield batch


@pytest.mark.gpu
def test_a_batch_that_is_larger_than_any_shape_is_computed_without(on_a_fake_gpu, caplog):
    caplog.set_level(logging.INFO, "sbkit.train.graphs")
    toy, counts = trained(ToyBrain, loader=Longer(steps=12, size=8, micros=1))
    assert [count.launches > MICRO + UPDATE for count in counts[4:]] == [False, False, False, True] * 2
    said = [record.message for record in caplog.records if "larger than its shape" in record.message]
    assert len(said) == 1 and toy.optimizer_step == 12


@pytest.mark.gpu
def test_a_driver_without_graphs_trains_without(monkeypatch, caplog):
    def refuse(graph, *given, **named):
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    caplog.set_level(logging.INFO, "sbkit.train.graphs")
    assert trained()[0].optimizer_step == 8
    said, = [record.message for record in caplog.records if "not captured" in record.message]
    assert said.startswith("Steps are not captured as CUDA graphs: CUDA error: operation not supported")


def launched_on_a_rank(micros):
    """Launches of each step, and the collectives that Python called, each with the step and whether it was captured."""
    device = f"cuda:{ranks.rank()}"
    called, all_reduce = [], torch.distributed.all_reduce

    def noted(tensor, *args, **kwargs):
        if tensor.device.type == "cuda":
            called.append((toy_steps[0], torch.cuda.is_current_stream_capturing()))
        return all_reduce(tensor, *args, **kwargs)

    toy_steps = [0]
    torch.distributed.all_reduce = noted
    try:
        _, counts = trained(ToyBrain, device=device, after=lambda toy: toy_steps.append(toy_steps.pop() + 1),
                            loader=ToyTrainLoader(steps=8, size=8, micros=micros, rank=ranks.rank(), world=2))
    finally:
        torch.distributed.all_reduce = all_reduce
    return launches(counts), called, fake_gpu.errors() if fake_gpu.active() else []


@pytest.mark.gpu(cards=2)
@pytest.mark.parametrize("micros", [1, 2])
def test_two_ranks_sum_gradients_within_the_graph_of_the_last_micro_step(micros):
    for counts, called, errors in results(launched_on_a_rank, micros):
        assert max(counts[4:], default=0) <= (MICRO + 1) * micros + UPDATE and errors == []
        assert any(captured for _, captured in called), "of a bucket, as a node of a graph"
        later = [captured for step, captured in called if step >= 4]
        assert later == [False] * 4, "a step calls one, of its sums"


@pytest.mark.gpu(values=True)
@pytest.mark.parametrize("options", [{}, {"micros": 3}, {"precision": "fp16", "micros": 2}], ids=str)
def test_replays_compute_what_steps_compute(options):
    toys = [trained(hparams={"graphs": wanted}, **options)[0] for wanted in (True, False)]
    assert toys[0].trainer.runner.nodes and not toys[1].trainer.runner.nodes
    assert furthest(*map(state, toys)) < 1e-5


def test_nothing_is_captured_on_a_cpu(caplog):
    caplog.set_level(logging.INFO, "sbkit.train.graphs")
    toy, _ = trained(ToyBrain, device="cpu", steps=3)
    assert toy.trainer.runner.nodes == {} and not any("CUDA graph" in record.message for record in caplog.records)


class DrawsOnOneRank(ToyBrain):
    def compute_forward(self, batch, stage):
        outputs = super().compute_forward(batch, stage)
        return outputs * (1 + random.random()) if ranks.rank() == 1 else outputs


def captured_on_a_rank():
    toy, _ = trained(DrawsOnOneRank, device=f"cuda:{ranks.rank()}",
                     loader=ToyTrainLoader(steps=8, size=8, rank=ranks.rank(), world=2))
    return toy.trainer.runner.phase.name, toy.optimizer_step


@pytest.mark.gpu(cards=2)
def test_a_rank_that_alone_can_not_capture_goes_on_with_the_others():
    assert results(captured_on_a_rank) == [("CAPTURING", 8), ("STOPPED", 8)]
