"""Steps that are replayed compute what steps compute, also where there is no card."""

import itertools
import logging
from functools import partial

import pytest
import replayed
import torch
from processes import results
from toys import ToyBrain, ToyTrainLoader, brain, furthest, layers, state

from sbkit.train.averaging import EMA
from sbkit.train.distributed import ranks
from sbkit.train.graphs.capture import MicroStepCapture, UpdateCapture
from sbkit.train.graphs.recorder import Recorder
from sbkit.train.graphs.variants import Phase, Stage
from sbkit.train.loss import Loss
from sbkit.train.muon import Muon
from sbkit.train.runner import Eager

CALLS = itertools.count(1)


@pytest.mark.parametrize(("micros", "size"), [(1, 9), (3, 9), (2, 7)])  # of 7 rows, a step has two shapes
def test_replays_compute_what_steps_compute(micros, size, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "sbkit.train.graphs")
    replayed.on_cpu(monkeypatch)
    found = []
    for wanted in (True, False):
        model = layers()
        optimizer = partial(Muon, lr=0.01, modules=[model[0], model[2]], orthogonalize_every=3)
        toy = brain(modules=model, opt_class=optimizer, hparams={"graphs": wanted, "ema": EMA(model)})
        toy.fit(range(1, 2), ToyTrainLoader(steps=11, size=size, micros=micros))
        assert set(toy.trainer.runner.nodes) == ({"micro-step", "update"} if wanted else set()), caplog.text
        if wanted:
            assert stages(toy) == {Stage.VERIFIED}
        found.append(toy)
    assert furthest(*map(state, found)) < 1e-6


def stages(toy):
    """Where the variants of a run are at its end."""
    runner = toy.trainer.runner
    return {variant.stage for variants in (runner.micro_step_variants, runner.update_variants)
            for variant in variants.values()}


def fails_in_a_capture(*args, **kwargs):
    if replayed.capturing:
        raise RuntimeError("it can't be captured")
    return replayed.all_reduce(*args, **kwargs)


class UpdatesByPython(ToyBrain):
    """A hook of its optimizer keeps its updates from being captured."""

    def init_optimizers(self):
        super().init_optimizers()
        self.optimizer.register_step_pre_hook(lambda *given: None)


def trained_on_a_rank(wanted, all_reduce=replayed.all_reduce_or_record):
    """The gradients of each update, and the weights; the last micro-batch of a step is a dummy on rank 1."""
    with pytest.MonkeyPatch.context() as patched:
        replayed.on_cpu(patched)
        patched.setattr(torch.distributed, "all_reduce", all_reduce)
        model, gradients = layers(), []
        toy = brain(UpdatesByPython, modules=model, opt_class=partial(torch.optim.SGD, lr=0.01),
                    hparams={"graphs": wanted})
        eager_update = Eager.apply_gradients

        def kept(eager, optimizers, sums, rates):
            gradients.append([None if each.grad is None else each.grad.clone() for each in model.parameters()])
            return eager_update(eager, optimizers, sums, rates)

        patched.setattr(Eager, "apply_gradients", kept)
        toy.fit(range(1, 2), ToyTrainLoader(6, 3, ranks.rank(), 2, micros=2))
        return gradients, state(toy), toy.trainer.runner.nodes


@pytest.mark.slow
@pytest.mark.parametrize("all_reduce", [replayed.all_reduce_or_record, fails_in_a_capture])
def test_ranks_that_sum_within_graphs_get_the_gradients_of_those_without_to_the_bit(all_reduce):
    replays, plain = results(trained_on_a_rank, True, all_reduce), results(trained_on_a_rank, False)
    for (gradients, weights, nodes), (expected, others, none) in zip(replays, plain, strict=True):
        assert "micro-step" in nodes and not none
        assert all(torch.equal(one, other) for step, same in zip(gradients, expected, strict=True)
                   for one, other in zip(step, same, strict=True) if other is not None)
        assert furthest(weights, others) == 0
    assert furthest(replays[0][1], replays[1][1]) == 0


def out_of_memory_on_a_rank(kind):
    """Train on two ranks, of which the second has no memory for graphs of this kind."""
    with pytest.MonkeyPatch.context() as patched:
        replayed.on_cpu(patched)
        record = Recorder.record

        def on_a_full_card(recorder, of_kind, work):
            if ranks.rank() == 1 and of_kind == kind:
                out_of_memory()
            return record(recorder, of_kind, work)

        patched.setattr(Recorder, "record", on_a_full_card)
        toy = brain(modules=layers(), opt_class=partial(torch.optim.SGD, lr=0.01), hparams={"graphs": True})
        toy.fit(range(1, 2), ToyTrainLoader(6, 3, ranks.rank(), 2, micros=2))
        return state(toy), set(toy.trainer.runner.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("kind, of_other", [("micro-step", set()), ("update", {"micro-step"})])
def test_a_rank_that_stops_capturing_alone_keeps_no_other_waiting(kind, of_other):
    (first, nodes), (second, nodes_of_other) = results(out_of_memory_on_a_rank, kind, timeout=60)
    assert "micro-step" in nodes and nodes_of_other == of_other
    assert furthest(first, second) == 0


def test_an_update_that_there_is_no_memory_to_compare_is_taken_once(monkeypatch):
    verify = UpdateCapture.verify

    def without_memory(capture, *args):
        with pytest.MonkeyPatch.context() as full:
            full.setattr(torch, "_foreach_sub", out_of_memory)
            return verify(capture, *args)

    found = []
    for wanted in (True, False):
        with monkeypatch.context() as patched:
            replayed.on_cpu(patched)
            patched.setattr(UpdateCapture, "verify", without_memory)
            optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
            toy = brain(modules=layers(), opt_class=optimizer, hparams={"graphs": wanted})
            toy.fit(range(1, 2), ToyTrainLoader(steps=6, size=9))
            found.append(state(toy))
            if wanted:
                assert stages(toy) == {Stage.REFUSED} and toy.trainer.runner.phase is Phase.STOPPED
    assert furthest(*found) < 1e-6


def test_a_micro_step_that_there_is_no_memory_to_compare_is_replayed_all_the_same(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "sbkit.train.graphs")
    verify = MicroStepCapture.verify

    def without_memory(capture, *args):
        with pytest.MonkeyPatch.context() as full:
            full.setattr(torch, "_foreach_zero_", out_of_memory)
            return verify(capture, *args)

    replayed.on_cpu(monkeypatch)
    monkeypatch.setattr(MicroStepCapture, "verify", without_memory)
    toy = brain(modules=layers(), opt_class=partial(torch.optim.SGD, lr=0.01), hparams={"graphs": True})
    toy.fit(range(1, 2), ToyTrainLoader(steps=6, size=9))
    assert stages(toy) == {Stage.CAPTURED, Stage.VERIFIED}  # of the micro-step and of the update
    assert all(variant.graph is not None for variant in toy.trainer.runner.micro_step_variants.values())
    assert "A captured micro-step is replayed without a comparison" in caplog.text
    assert "A captured update is" not in caplog.text


def out_of_memory(*args, **kwargs):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


class OtherLoss(ToyBrain):
    """Counts its calls where nobody looks, and with them weights the loss."""

    def compute_objectives(self, predictions, batch, stage):
        total, count, _ = super().compute_objectives(predictions, batch, stage)
        return Loss(total * next(CALLS), count)


class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * next(CALLS)


class OtherGradient(ToyBrain):
    """The same, of gradients."""

    def compute_objectives(self, predictions, batch, stage):
        return super().compute_objectives(Weighted.apply(predictions), batch, stage)


@pytest.mark.parametrize(("cls", "what"), [(OtherLoss, "loss"), (OtherGradient, "gradient")])
def test_a_replay_that_computes_something_else_trains_nothing(cls, what, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "sbkit.train.graphs")
    replayed.on_cpu(monkeypatch)
    toy = brain(cls, hparams={"graphs": True})
    toy.fit(range(1, 2), ToyTrainLoader(steps=5, size=9))
    said = [record.message for record in caplog.records if "captured" in record.message]
    assert len(said) == 1 and said[0].startswith(
        f"Steps are not captured as CUDA graphs: a replay computes another {what} than the step: ")
    assert toy.optimizer_step == 5
    assert stages(toy) == {Stage.REFUSED} and toy.trainer.runner.phase is Phase.STOPPED
    variant, = toy.trainer.runner.micro_step_variants.values()
    assert variant.graph is None and variant.reason in said[0]
