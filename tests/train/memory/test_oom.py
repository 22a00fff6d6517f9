"""A run whose largest micro-batch doesn't fit into memory ends before its first step, and says what fits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from processes import outcomes
from refusals import refused
from toys import ToyBatch, ToyBrain, ToyEvalLoader, ToyTrainLoader, batch_of, brain, layers, state

from sbkit.errors import SbkitError
from sbkit.system import memory
from sbkit.train.distributed import ranks
from sbkit.train.memory import largest, oom


@pytest.fixture(autouse=True)
def _bounded(monkeypatch):
    monkeypatch.setattr(memory, "bounded", lambda: True)  # where there is something to find out


@dataclasses.dataclass
class Sized(ToyBatch):
    """With what a message says of it."""

    def __len__(self):
        return len(self.ids)


class Loader(ToyTrainLoader):
    """The largest of its micro-batches has eight rows."""

    def largest(self, epoch):
        batch = batch_of(range(8))
        return [Sized(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)})]


class Narrow(ToyBrain):
    """A device on which no more than ``fits`` rows have room, in forward or in backward."""

    fits, where = 1000, "forward"

    def compute_forward(self, batch, stage):
        torch.rand(1)  # of dropout, say
        too_many = len(batch.x) > self.fits and (stage is None or stage.name == "TRAIN")
        if too_many and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        predictions = super().compute_forward(batch, stage)
        if too_many:
            predictions.register_hook(self.fail)
        return predictions

    @staticmethod
    def fail(grad):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_what_training_depends_on_is_as_if_nothing_had_been_tried():
    states = []
    for loader in (Loader, ToyTrainLoader):
        torch.manual_seed(3)
        toy = brain(Narrow)
        toy.fit([1, 2], loader(5, 8), ToyEvalLoader(4))
        states.append((state(toy), toy.ends, torch.rand(1).item()))
    (tried, ends, drawn), (plain, expected, number) = states
    assert all(torch.equal(tried[name], plain[name]) for name in plain) and ends == expected and drawn == number


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("fits", [7, 1, 0])
def test_the_run_ends_before_its_first_step_with_what_fits(where, fits):
    toy = brain(Narrow)
    toy.fits, toy.where = fits, where
    with refused("out-of-memory") as ended:
        toy.fit([1], Loader(5, 4))
    assert toy.optimizer_step == 0 and ended.value.exit_code == 1


def test_it_is_tried_again_before_parameters_thaw():
    class Thawing(Narrow):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            self.fits = 1000 if self.optimizer_step < 2 else 5

    toy = brain(Thawing, hparams={"freeze": {"model.0": 3}})
    with refused("out-of-memory"):
        toy.fit([1], Loader(5, 4))
    assert toy.optimizer_step == 3


class Greedy(ToyBrain):
    def compute_objectives(self, predictions, batch, stage):
        raise MemoryError


class Wrong(ToyBrain):
    def compute_forward(self, batch, stage):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize("cls, error, says", [
    (Greedy, SbkitError, r"out of memory on cpu.*MemoryError.*sbkit tune"), (Wrong, RuntimeError, "cannot be multi")])
def test_a_later_lack_of_memory_ends_the_run_and_names_what_helps(cls, error, says):
    with pytest.raises(error, match=says) as ended:
        brain(cls).fit([1], ToyTrainLoader(5, 8))
    assert getattr(ended.value, "exit_code", 1) == 1
    with pytest.raises(error, match=says):
        brain(cls).evaluate(ToyEvalLoader(4))


def test_a_step_that_did_not_fit_leaves_nothing_behind():
    toy = brain(Narrow)
    toy.on_fit_start()
    toy.fits, toy.where, before = 3, "backward", state(toy)
    assert not toy.try_batch(batch_of(range(4)))
    assert all(torch.equal(value, before[name]) for name, value in state(toy).items()) and toy.optimizer_step == 0
    assert all(parameter.grad is None for parameter in toy.modules.parameters())
    toy.fits = 1000
    assert toy.try_batch(batch_of(range(4))) and toy.optimizer_step == 1


def narrow_second(hparams, normalised):
    memory.bounded, largest.TRIAL_SECONDS = lambda: True, 2.0  # in this process alone
    model = layers()
    if normalised:
        model[0] = torch.nn.Sequential(model[0], torch.nn.BatchNorm1d(8))
    toy = brain(Narrow, modules=model, hparams=hparams)
    toy.fits = 1 if ranks.rank() == 1 else 1000
    toy.fit([1], Loader(5, 8, ranks.rank(), ranks.world_size()))


@pytest.mark.slow
@pytest.mark.parametrize("hparams, normalised", [({}, False), ({"fsdp": True}, False), ({}, True)],
                         ids=["sums after backward", "fsdp", "statistics of all ranks"])
def test_if_it_does_not_fit_on_one_rank_all_end(hparams, normalised):
    first, second = outcomes(narrow_second, hparams, normalised, timeout=60)
    assert None not in (first.error, second.error) and "largest micro-batch" in f"{first.error} {second.error}"


@pytest.mark.parametrize("error, is_one", [
    (torch.OutOfMemoryError("x"), True), (RuntimeError("CUDA error: out of memory"), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: ..."), True),
    (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True), (MemoryError(), True),
    (RuntimeError("std::bad_alloc"), True), (RuntimeError("unable to mmap 8 bytes: Cannot allocate memory (12)"), True),
    (RuntimeError("shape mismatch"), False), (ValueError("out of memory"), False)])
def test_libraries_say_it_in_different_ways(error, is_one):
    assert oom.is_out_of_memory(error) is is_one


def test_what_onednn_says_is_about_memory_where_memory_is_bounded(monkeypatch):
    error = RuntimeError("could not create a primitive")
    monkeypatch.setattr(memory, "bounded", lambda: False)
    assert not oom.is_out_of_memory(error)
    monkeypatch.setattr(memory, "bounded", lambda: True)
    assert oom.is_out_of_memory(error)
