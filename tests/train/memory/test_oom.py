"""A step that runs out of memory is computed in parts, and is the step it would have been."""

from __future__ import annotations

import logging
import os
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import outcomes, results
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.processing.features import InputNormalization
from toys import ToyBrain, ToyEvalLoader, ToyTrainLoader, batch_of, brain, furthest, layers, state

from sbkit.data.batch import Batch
from sbkit.errors import SbkitError
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks
from sbkit.train.memory import host, oom


class Narrow(ToyBrain):
    """A device on which no more than ``fits`` rows have room, in forward or in backward."""

    fits, where, attempts = 3, "forward", 0

    def compute_forward(self, batch, stage):
        too_many = stage.name == "TRAIN" and len(batch.x) > self.fits
        self.attempts += too_many
        if too_many and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        predictions = super().compute_forward(batch, stage)
        if too_many and self.where == "backward":
            # the last layer's gradients are written by then, the first layer's are not
            self.hparams.model[1].weight.register_hook(self._fail_once())
        return predictions

    @staticmethod
    def _fail_once():
        failed = []

        def fail(grad):
            if not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return grad
        return fail


class InBackward(Narrow):
    where = "backward"


class Scalar(Narrow):
    """A loss as SpeechBrain's recipes have it: the mean over a batch."""

    def compute_objectives(self, predictions, batch, stage):
        return ((predictions - batch.x.sum(-1)) ** 2).mean()


class Wide(Scalar):
    fits = 1000


def train(cls, micros=1, world=(0, 1), **kwargs):
    toy = brain(cls, **kwargs)
    toy.fit(range(1, 3), ToyTrainLoader(5, 8, *world, micros), ToyEvalLoader(4))
    return toy


@pytest.mark.slow
@pytest.mark.parametrize("cls, micros", [(Narrow, 1), (InBackward, 1), (Narrow, 2), (InBackward, 2)])
def test_a_step_in_parts_is_the_step_it_would_have_been(cls, micros, caplog):
    whole = train(ToyBrain, micros)
    with caplog.at_level(logging.WARNING):
        parts = train(cls, micros)
    assert furthest(state(whole), state(parts)) < 1e-6
    assert parts.optimizer_step == whole.optimizer_step == 10
    assert [loss for _, loss in parts.ends] == pytest.approx([loss for _, loss in whole.ends], rel=1e-5)
    told = [r.message for r in caplog.records if r.name == oom.__name__]
    assert told[0].startswith(f"Step 1: no memory left on cpu for a micro-batch of {8 // micros} utterances of 1 s")
    assert "computed in 2 parts" in told[0]


@pytest.mark.slow
def test_a_size_that_failed_once_is_not_tried_again(caplog):
    toy = train(Narrow)
    assert toy.attempts == 2  # eight rows, then four
    told = [r.message for r in caplog.records if r.name == oom.__name__]
    assert len(told) == 4 and "micro-batch of 8 utterances of 1 s with padding in 2 parts" in told[1]
    assert told[2].startswith("5 micro-batches of this epoch did not fit into memory")


@pytest.mark.slow
def test_a_scalar_loss_counts_by_its_share_of_utterances():
    whole, parts = train(Wide), train(Scalar)
    assert parts.attempts == 2 and whole.attempts == 0
    assert furthest(state(whole), state(parts)) < 1e-6


def test_earlier_micro_batches_are_repeated_with_the_numbers_they_had():
    drawn = []

    class Drawing(Narrow):
        """Fails in the second micro-batch, once, after the first drew its numbers."""

        def compute_forward(self, batch, stage):
            if stage.name == "TRAIN":
                drawn.append((batch.ids[0], torch.rand(1).item()))
                if len(drawn) == 2:
                    raise torch.OutOfMemoryError("out of memory")
            return ToyBrain.compute_forward(self, batch, stage)

    toy = brain(Drawing)
    torch.manual_seed(5)
    toy.fit([1], ToyTrainLoader(1, 8, micros=2))
    first, second, again, *parts = drawn
    assert again == first
    assert parts[0] == second and len(parts) == 2  # the one that failed begins where it began


class Full(Narrow):
    fits = 0


class Greedy(ToyBrain):
    def optimizers_step(self):
        raise MemoryError


class Wrong(ToyBrain):
    def compute_forward(self, batch, stage):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize("cls, error, says", [
    (Full, SbkitError, r"out of memory on cpu with a single utterance.*max_duration"),
    (Greedy, SbkitError, r"out of memory on cpu.*MemoryError.*sbkit tune"),
    (Wrong, RuntimeError, "cannot be multiplied")])
def test_errors_that_parts_cannot_avoid_end_the_run(cls, error, says):
    with pytest.raises(error, match=says) as ended:
        train(cls)
    assert getattr(ended.value, "exit_code", 1) == 1


class NarrowToo(ToyBrain):
    """So is it in evaluation; each utterance is noted as a recipe notes transcripts."""

    fits, attempts = 3, 0

    def evaluate_batch(self, batch, stage):
        if len(batch.x) > self.fits:
            self.attempts += 1
            raise torch.OutOfMemoryError("out of memory")
        self.heard = [*getattr(self, "heard", []), *batch.ids]
        loss = super().evaluate_batch(batch, stage)
        return float(loss.mean) if self.hparams.scalar else loss


class Whole:
    """An evaluation set in batches of seven."""

    def __iter__(self):
        return (batch_of(range(i, i + 7)) for i in range(0, 21, 7))


@pytest.mark.slow
@pytest.mark.parametrize("scalar", [False, True])
def test_an_evaluation_in_halves_is_the_evaluation_it_would_have_been(scalar, caplog):
    narrow, wide = brain(NarrowToo, hparams={"scalar": scalar}), brain(NarrowToo, hparams={"scalar": False})
    wide.fits = 1000
    loss = narrow.evaluate(Whole())
    assert narrow.heard == list(range(21)) and narrow.attempts == 2  # seven rows, then four
    if not scalar:
        assert loss == pytest.approx(wide.evaluate(Whole()), rel=1e-5)
    else:  # each half counts by its utterances
        assert loss == pytest.approx(sum(
            sum(narrow.evaluate_batch(batch_of(part), None) * len(part) for part in (
                range(i, i + 3), range(i + 3, i + 5), range(i + 5, i + 7))) / 7 for i in (0, 7, 14)) / 3, rel=1e-5)
    told = [r.message for r in caplog.records if r.name == oom.__name__]
    assert told[0].startswith("No memory left on cpu to evaluate a batch of 7 utterances") and len(told) == 2


def test_an_utterance_that_can_not_even_be_evaluated_is_named():
    toy = brain(NarrowToo, hparams={"scalar": False})
    toy.fits = 0
    with pytest.raises(SbkitError, match=r"out of memory on cpu with a single utterance \(0\).*max_duration"):
        toy.evaluate(Whole())


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
    monkeypatch.setattr(host, "bounded", lambda: False)
    assert not oom.is_out_of_memory(error)
    monkeypatch.setattr(host, "bounded", lambda: True)
    assert oom.is_out_of_memory(error)


class Stuck(ToyBrain):
    """A library refuses every larger batch in a thread in which it failed once."""

    stuck = ()

    def compute_forward(self, batch, stage):
        here = threading.get_ident()
        if (len(batch.x) > 4 and stage.name == "TRAIN") or here in self.stuck:
            self.stuck = (*self.stuck, here)
            raise RuntimeError("could not create a primitive")
        return super().compute_forward(batch, stage)


def test_a_thread_in_which_onednn_is_stuck_is_replaced(monkeypatch):
    monkeypatch.setattr(host, "bounded", lambda: True)
    toy = train(Stuck)
    assert toy.stuck == (threading.get_ident(),) and toy.optimizer_step == 10
    assert furthest(state(train(ToyBrain)), state(toy)) < 1e-6


# ------------------------------------------------------------------------------------------------ for real


class Large(ToyBrain):
    """Each utterance takes a megabyte, five times in forward and seven times at once in backward."""

    def compute_forward(self, batch, stage):
        wide = batch.x[:, :1].repeat(1, 1 << 18 if stage.name == "TRAIN" else 1)
        for _ in range(4):
            wide = torch.sigmoid(wide * (1.0 + 0.0 * self.hparams.model[0].weight.sum()))
        return super().compute_forward(batch, stage) + 0.0 * wide.mean()


def train_with_little(rank, size, megabytes):
    """Without a bound, then with one on this rank; the second time's warnings."""
    def run():
        toy = brain(Large)
        toy.fit([1], ToyTrainLoader(2, size, ranks.rank(), ranks.world_size()))
        return toy

    whole, told = state(run()), []
    host.release_memory()
    if ranks.rank() == rank:
        used = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        host.bound(used + (megabytes << 20))
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger(oom.__name__).addHandler(handler)
    parts = run()
    return furthest(whole, state(parts)), parts.optimizer_step, told


on_linux = pytest.mark.skipif(not host.can_bound(), reason="only Linux keeps a process to a bound of memory")


@pytest.mark.slow
@on_linux
def test_a_process_without_memory_for_its_step_continues_in_parts():
    ((apart, steps, told),) = results(train_with_little, 0, 32, 135, world=1)
    assert apart < 1e-5 and steps == 2
    assert told[0].startswith("Step 1: no memory left on cpu for a micro-batch of 32 utterances")


@on_linux
@pytest.mark.slow
def test_one_of_two_processes_continues_in_parts():
    (apart, _, plenty), (_, steps, told) = results(train_with_little, 1, 64, 135)
    assert apart < 1e-5 and steps == 2 and plenty == []
    assert "of this size are now computed in" in told[0]


# ------------------------------------------------------------------------------------------------ batches


def test_rows_of_any_batch():
    ours = Batch(
        ids=list("abcd"), texts=list("wxyz"), damaged=[("e", "cut"), ("f", "cut"), ("g", "cut"), ("h", "cut")],
        signals=torch.arange(8.0).reshape(4, 2), signal_lengths=torch.tensor([2, 2, 1, 1]),
        tokens=torch.ones(4, 3, dtype=torch.long), token_lengths=torch.tensor([3, 2, 1, 1]))
    part = oom.rows(ours, 1, 3)
    assert part.ids == ["b", "c"] and part.texts == ["x", "y"] and part.signals.tolist() == [[2, 3], [4, 5]]
    assert part.signal_lengths.tolist() == [2, 1] and len(part.damaged) == 4
    assert (oom.length(ours), oom.largest(ours), oom.length(part)) == (4, 12, 2)

    theirs = PaddedBatch([{"id": name, "sig": torch.ones(n), "n": n} for name, n in zip("abc", (3, 1, 2), strict=True)])
    part = oom.rows(theirs, 0, 2)
    assert part.id == ["a", "b"] and part.sig.data.shape == (2, 3)
    assert part.sig.lengths.tolist() == pytest.approx([1, 1 / 3])
    assert oom.length(theirs) == 3 and oom.length(part) == 2

    x, y = torch.arange(4), torch.arange(8).reshape(4, 2)
    assert [t.tolist() for t in oom.rows((x, y), 2, 4)] == [[2, 3], [[4, 5], [6, 7]]]
    assert oom.rows({"x": x, "rate": 16000}, 0, 1)["x"].tolist() == [0] and oom.length([x, y]) == 4
    assert oom.length(object()) == 1 and oom.largest(object()) == 0


def saved_and_resumed(folder, caplog, **changed):
    """What a run takes for granted that goes on from one that got through 4.0; ``changed``: its options."""
    toy = brain(checkpointer=Checkpointer(folder))
    toy.on_fit_start()
    toy.trainer.memory.largest_step_that_fit = 4.0
    toy.checkpointer.save_checkpoint()
    toy.checkpointer.wait()
    again = brain(checkpointer=Checkpointer(folder), **changed)
    with caplog.at_level("INFO", logger="sbkit.train.memory.oom"):
        again.on_fit_start()
    return again.trainer.memory.largest_step_that_fit


@pytest.mark.parametrize("changed, held", [
    ({}, 4.0), ({"precision": "bf16"}, 0.0), ({"hparams": {"activation_checkpointing": ["Linear"]}}, 0.0)], ids=str)
def test_the_size_that_fit_is_kept_if_a_step_takes_no_more_memory(tmp_path, caplog, changed, held):
    assert saved_and_resumed(tmp_path, caplog, **changed) == held and ("tried again" in caplog.text) == (not held)


def test_the_size_that_fit_is_not_kept_on_a_gpu_with_less_memory(tmp_path, caplog, monkeypatch):
    found = iter(["a card, 80 GiB", "a card, 24 GiB"])
    monkeypatch.setattr(oom.devices, "described", lambda device: next(found))
    assert saved_and_resumed(tmp_path, caplog) == 0.0
    assert "was on a card, 80 GiB in fp32 and is now on a card, 24 GiB in fp32" in caplog.text


def test_the_size_that_fit_is_not_kept_from_a_checkpoint_without_a_device(caplog):
    toy = brain()
    toy.on_fit_start()
    with caplog.at_level("INFO", logger="sbkit.train.memory.oom"):
        toy.trainer.memory.load_state_dict({"got_through": 4.0})
    assert toy.trainer.memory.largest_step_that_fit == 0.0 and "was on other devices and is now on" in caplog.text


# ------------------------------------------------------------------------------------------------ ranks


class NarrowSecond(Narrow):
    """Only rank 1 has little memory."""

    def compute_forward(self, batch, stage):
        self.fits = 1 if ranks.rank() == 1 else 1000
        return super().compute_forward(batch, stage)


class InBackwardSecond(NarrowSecond):
    where = "backward"


class ToyCounting(ToyBrain):
    """Averages gradients behind a backward once only."""

    attempts = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        exchange = self.trainer.exchange

        def counted():
            exchange()
            self.attempts += 1
            assert self.attempts == 1

        self.trainer.exchange = counted


class Normalised(NarrowSecond):
    """With a layer that asks the other ranks in each forward."""

    def compute_forward(self, batch, stage):
        self.modules.norm(batch.x[:, None])
        return super().compute_forward(batch, stage)


def train_normalised():
    model = layers()
    toy = Normalised({"model": model, "norm": InputNormalization()}, partial(torch.optim.SGD, lr=0.01),
                      {"model": model}, {"device": "cpu"})
    toy.fit(range(1, 2), ToyTrainLoader(2, 8, ranks.rank(), ranks.world_size()), progressbar=False)


@pytest.mark.slow
def test_a_rank_does_not_repeat_alone_what_the_others_take_part_in():
    found = outcomes(train_normalised, timeout=60)
    assert "'norm' needs the values of all ranks" in str(found[1].error)
    assert found[0].error is not None


def train_as_rank(cls, micros, most=0.0):
    toy = brain(cls)
    place = ranks.rank(), ranks.world_size()
    toy.fit(range(1, 3),
            ToyTrainLoader(5, 8, *place, micros, lambda batch: setattr(batch, "largest_micro_batch", most)),
            ToyEvalLoader(4))
    return state(toy), toy.attempts, toy.trainer.memory.largest_step_that_fit


@pytest.mark.slow
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("cls, most", [(NarrowSecond, 0.0), (InBackwardSecond, 4.0)], ids=["forward", "backward"])
def test_one_rank_of_two_may_run_out_of_memory(cls, most, micros):
    """In a backward, where the step was known to be the largest."""
    whole = state(train(ToyBrain))
    (first, plenty, got), (second, failed, other) = results(train_as_rank, cls, micros, most)
    assert plenty == 0 and failed >= 1 and got == other == 0.0  # what one had to cut no rank takes for granted
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert furthest(whole, first) < 1e-5


@pytest.mark.slow
def test_steps_of_a_size_that_fit_are_averaged_during_their_backward():
    whole = state(train(ToyBrain))
    for found, _, got in results(train_as_rank, ToyCounting, 1, 4.0):
        assert furthest(whole, found) < 1e-5 and got == 4.0


@pytest.mark.slow
def test_two_ranks_end_together_where_gradients_are_on_their_way():
    found = outcomes(train_as_rank, InBackwardSecond, 1)
    assert "while gradients were being exchanged with the other ranks" in str(found[1].error)
    assert found[0].error is not None and max(outcome.seconds for outcome in found) < 60
