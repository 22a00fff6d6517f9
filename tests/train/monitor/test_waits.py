"""Waits for a GPU are counted from torch's own warnings, which nobody sees; waits for a core are told once, in time."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from toys import ToyBrain, ToyTrainLoader, brain

from sbkit.train.monitor import waits
from sbkit.train.monitor.timing import StepBudget
from sbkit.train.monitor.waits import Contention, HostWaits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Card:
    """Stands in for the debug mode of ``torch.cuda``, with the words of torch 2.11."""

    def __init__(self):
        self.mode, self.noticed = 0, False

    def get(self):
        return self.mode

    def set(self, mode):
        if not self.noticed:
            self.noticed = True
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all "
                          "synchronizing operations (Triggered internally at /torch/csrc/cuda/Module.cpp:1.)",
                          stacklevel=3)
        self.mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

    def wait(self):
        if self.mode == 1:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at "
                          "/c10/cuda/CUDAFunctions.cpp:1.)", stacklevel=2)


@pytest.fixture
def card(monkeypatch):
    fake = Card()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", fake.get)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", fake.set)
    return fake


@pytest.fixture
def shown():
    """The warnings that somebody would see."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


def steps(counter, count, each=lambda: None):
    for _ in range(count):
        each()
        counter.step()


def test_the_waits_of_the_steps_after_the_first_few_are_counted_and_not_shown(card, shown):
    counter, before = HostWaits(CUDA), warnings.showwarning

    def step():
        card.wait(), card.wait()
        warnings.warn("something else", stacklevel=1)

    with counter:
        steps(counter, waits.SKIPPED - 1, step)
        assert card.mode == 0 and counter.per_step() is None and counter.describe() is None
        steps(counter, waits.COUNTED, step)
        assert card.mode == 1
        steps(counter, 20, step)
        assert card.mode == 0 and warnings.showwarning is before
    assert counter.per_step() == 2
    assert counter.describe().startswith("host waits 2 a step, most of them at monitor/test_waits.py:")
    assert {str(each.message) for each in shown} == {"something else"}
    assert len(shown) == waits.SKIPPED - 1 + waits.COUNTED + 20

    counter.reset()
    with counter:
        steps(counter, waits.SKIPPED + 10)
    assert (counter.per_step(), counter.describe(), card.mode) == (0, "host waits 0 a step", 0)


def test_a_warning_is_not_repeated_in_later_epochs(card):
    counter = HostWaits(CUDA)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for told in (2, 0, 0):  # the second time as the filters change
            seen.clear()
            with counter:
                steps(counter, waits.SKIPPED + 4, lambda: (card.wait(), warnings.warn("something else", stacklevel=1)))
            assert [str(each.message) for each in seen] == ["something else"] * told and counter.per_step() == 1
            counter.reset()


def test_only_what_belongs_to_the_steps_counts(card, shown):
    counter = HostWaits(CUDA)
    with counter:
        steps(counter, waits.SKIPPED)
        with counter.pause():  # a checkpoint
            card.wait()
            with counter.pause():
                card.wait()
            card.wait()
        writer = threading.Thread(target=card.wait)
        writer.start()
        writer.join()
        card.wait()
        steps(counter, 4)
    assert counter.per_step() == 0.25 and not shown


def test_what_the_compiler_reads_for_itself_is_no_wait_of_a_step(card, shown):
    counter = HostWaits(CUDA)

    def compiler(graph, inputs):
        card.wait()
        return graph.forward

    with counter:
        steps(counter, waits.SKIPPED)
        for length in (3, 4):
            torch.compile(lambda x: x + 1, backend=compiler, dynamic=False)(torch.ones(length))
        steps(counter, 4)
    torch.compiler.reset()
    assert counter.per_step() == 0 and not shown


def test_a_sync_debug_mode_of_the_user_is_kept(card, shown):
    counter = HostWaits(CUDA)
    card.mode = 2
    with counter:
        steps(counter, waits.SKIPPED + 3)
    assert card.mode == 2 and counter.per_step() is None
    card.mode = 0
    counter.reset()
    with counter:
        steps(counter, waits.SKIPPED)
        card.mode = 2
    assert card.mode == 2


def epoch_line(toy, tmp_path):
    toy.metrics_log.flush()
    epoch = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert epoch["kind"] == "epoch"
    return epoch


class Waiting(ToyBrain):
    card: Card

    def compute_objectives(self, predictions, batch, stage):
        if self.optimizer_step == waits.SKIPPED + 3:
            self.card.wait()
        if self.optimizer_step == getattr(self, "breaks_at", None):
            raise RuntimeError("broken")
        return super().compute_objectives(predictions, batch, stage)


def test_an_epoch_says_how_often_a_step_waited(card, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    toy = brain(Waiting, hparams={"output_folder": str(tmp_path)})
    toy.card, toy.trainer.budget.waits = card, HostWaits(CUDA)
    toy.fit([1], ToyTrainLoader(waits.SKIPPED + 4))
    assert epoch_line(toy, tmp_path)["host_waits_per_step"] == 0.25
    assert any("host waits 0.25 a step, most of them at monitor/test_waits.py" in line for line in caplog.messages)


def test_a_run_that_breaks_leaves_no_mode_behind(card):
    toy = brain(Waiting)
    toy.card, toy.trainer.budget.waits, toy.breaks_at = card, HostWaits(CUDA), waits.SKIPPED + 2
    before = warnings.showwarning
    with pytest.raises(RuntimeError, match="broken"):
        toy.fit([1], ToyTrainLoader(waits.SKIPPED + 4))
    assert card.mode == 0 and warnings.showwarning is before and toy.trainer.budget.waits.per_step() == 0


def test_waits_are_not_reported_without_a_gpu(card, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    toy = brain(hparams={"output_folder": str(tmp_path)})
    toy.fit([1], ToyTrainLoader(waits.SKIPPED + 4))
    assert not card.noticed and "host_waits_per_step" not in epoch_line(toy, tmp_path)
    assert any("step " in line for line in caplog.messages) and "host waits" not in caplog.text


def test_waits_in_a_backward_that_another_thread_runs_are_counted(card, shown):
    """On a card autograd has a thread for it; other threads, such as a checkpoint's, may wait."""
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            card.wait()
            return gradient * 2

    def step():
        loss = Waits.apply(torch.ones(4, requires_grad=True)).sum()
        for target in (loss.backward, card.wait):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()

    counter = HostWaits(CUDA)
    with counter:
        steps(counter, waits.SKIPPED + 3, step)
    assert counter.per_step() == 1


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        gradient.sum().item()
        return gradient * 2


@pytest.mark.gpu
def test_a_gpus_waits_in_forward_and_backward_are_counted(shown):
    budget = StepBudget("cuda")
    x = torch.ones(4, device="cuda", requires_grad=True)
    with budget.active():
        for _ in range(waits.SKIPPED + 6):
            loss = Reading.apply(x).sum()
            loss.item()
            loss.backward()
            budget.step()
    assert budget.waits.per_step() == 2 and torch.cuda.get_sync_debug_mode() == 0
    assert not [each for each in shown if "ynchroni" in str(each.message)]


# ------------------------------------------------------------------ for a core


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Two threads whose waits, in seconds, and the time are set by hand."""

    class Clock:
        now = 100.0

        def pass_(self, seconds: float, **threads: float) -> None:
            self.now += seconds
            for name, waited in threads.items():
                (tmp_path / name).mkdir(exist_ok=True)
                (tmp_path / name / "schedstat").write_text(f"5 {int(waited * 1e9)} 7\n")

    found = Clock()
    found.pass_(0, t1=2.0, t2=50.0)
    monkeypatch.setattr(waits, "THREADS", tmp_path)
    monkeypatch.setattr(waits.time, "monotonic", lambda: found.now)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    return found


def test_the_slowest_thread_counts_from_the_epochs_start(clock):
    counted = Contention(CPU)
    clock.pass_(10, t1=5.0, t2=51.0, t3=0.5)  # t3 has begun since
    assert counted.share() == pytest.approx(0.3)
    counted.reset()
    clock.pass_(10)
    assert counted.share() == 0.0


def test_waiting_for_a_core_is_reported_once_and_soon(clock, caplog):
    counted = Contention(CPU)
    clock.pass_(19, t1=12.0)
    counted.step()
    assert not caplog.records
    clock.pass_(2)
    counted.step()
    counted.step()
    counted.reset()
    clock.pass_(30, t1=40.0)
    counted.step()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "waited for a core 48 % of the time, and its 4 threads all wait" in record.message
    assert "OMP_NUM_THREADS=2" in record.message


def test_a_shorter_epoch_is_reported_at_its_end(clock, caplog):
    counted = Contention(CPU)
    clock.pass_(1, t1=3.0)
    assert counted.close() == 1.0 and not caplog.records  # a second says nothing
    clock.pass_(4)
    counted.step()
    assert not caplog.records and counted.close() == pytest.approx(0.2)
    assert len(caplog.records) == 1 and counted.close() is not None and len(caplog.records) == 1


def test_only_one_rank_warns(clock, caplog, monkeypatch):
    monkeypatch.setattr(waits.ranks, "is_main", lambda: False)
    counted = Contention(CPU)
    clock.pass_(30, t1=30.0)
    counted.step()
    assert counted.close() > 0.9 and not caplog.records


@pytest.mark.parametrize("device, there", [("cuda", True), ("cpu", False)])
def test_nothing_is_counted_where_it_says_nothing(clock, monkeypatch, tmp_path, device, there):
    if not there:
        monkeypatch.setattr(waits, "THREADS", tmp_path / "elsewhere")
    counted = Contention(torch.device(device))
    clock.pass_(30, t1=30.0)
    counted.step()
    assert counted.share() is None


def test_to_one_thread_there_is_nothing_to_advise(clock, monkeypatch, caplog):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    counted = Contention(CPU)
    clock.pass_(30, t1=14.0)
    counted.step()
    assert counted.close() == pytest.approx(0.4) and caplog.messages == [
        "Training waited for a core 40 % of the time. Other processes, data workers or ranks use the cores"]


def test_an_odd_line_and_a_thread_that_ends_are_passed_over(clock, tmp_path):
    counted = Contention(CPU)
    (tmp_path / "t1" / "schedstat").write_text("")
    (tmp_path / "t3").mkdir()
    (tmp_path / "t3" / "schedstat").write_text("0 9000000000 0\n")
    (tmp_path / "t4").mkdir()
    clock.pass_(10, t2=51.0)
    assert counted.share() == pytest.approx(0.1)


def test_an_epochs_line_has_its_share(monkeypatch, tmp_path):
    monkeypatch.setattr(Contention, "share", lambda self: 0.25)
    toy = brain(hparams={"output_folder": str(tmp_path)})
    toy.fit([1], ToyTrainLoader(3))
    assert epoch_line(toy, tmp_path)["core_wait_share"] == 0.25


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this kernel doesn't count waits")
def test_a_busy_core_is_seen(monkeypatch):
    """By the kernel's own counts: this process and another one share a core."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    allowed = os.sched_getaffinity(0)
    core = {min(allowed)}
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"],
                            preexec_fn=lambda: os.sched_setaffinity(0, core))
    budget = StepBudget(CPU)
    try:
        os.sched_setaffinity(0, core)
        time.sleep(0.5)
        budget.reset()
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            budget.step()
        assert budget.contention.share() > 0.15
    finally:
        os.sched_setaffinity(0, allowed)
        busy.kill()
        busy.wait()
