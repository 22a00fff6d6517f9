"""Other work that keeps training from its cores is told once, in time, and nothing is told where it has them all."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time

import pytest
import torch
from toys import ToyTrainLoader, brain

from sbkit.train.monitor import contention
from sbkit.train.monitor.contention import Contention
from sbkit.train.monitor.timing import StepBudget

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Two threads whose waits, in seconds, and the time are set by hand."""

    class Clock:
        now = 100.0

        def waited(self, **threads: float) -> None:
            for name, seconds in threads.items():
                (tmp_path / name).mkdir(exist_ok=True)
                (tmp_path / name / "schedstat").write_text(f"5 {int(seconds * 1e9)} 7\n")

    found = Clock()
    found.waited(t1=2.0, t2=50.0)
    monkeypatch.setattr(contention, "_THREADS", tmp_path)
    monkeypatch.setattr(contention.time, "monotonic", lambda: found.now)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    return found


def test_the_slowest_thread_counts_from_the_epochs_start(clock):
    counted = Contention(CPU)
    clock.now += 10
    clock.waited(t1=5.0, t2=51.0, t3=0.5)  # t3 has begun since
    assert counted.share() == pytest.approx(0.3)
    counted.reset()
    clock.now += 10
    assert counted.share() == 0.0


def test_it_is_told_once_and_soon(clock, caplog):
    counted = Contention(CPU)
    clock.now += 19
    clock.waited(t1=12.0)
    counted.step()
    assert not caplog.records
    clock.now += 2
    counted.step()
    counted.step()
    counted.reset()
    clock.now += 30
    clock.waited(t1=40.0)
    counted.step()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "waited for a core 48 % of the time, and its 4 threads all wait" in record.message
    assert "OMP_NUM_THREADS=2" in record.message


def test_later_epochs_are_looked_at_as_well(clock, caplog):
    counted = Contention(CPU)
    clock.now += 21
    counted.step()
    counted.reset()
    clock.now += 21
    clock.waited(t1=23.0)
    counted.step()
    assert len(caplog.records) == 1


def test_an_epoch_that_is_over_before_is_told_at_its_end(clock, caplog):
    counted = Contention(CPU)
    clock.now += 1
    clock.waited(t1=3.0)
    assert counted.close() == 1.0 and not caplog.records  # a second says nothing
    clock.now += 4
    counted.step()
    assert not caplog.records and counted.close() == pytest.approx(0.2)
    assert len(caplog.records) == 1 and counted.close() is not None and len(caplog.records) == 1


def test_one_rank_tells_it(clock, caplog, monkeypatch):
    monkeypatch.setattr(contention.ranks, "is_main", lambda: False)
    counted = Contention(CPU)
    clock.now += 30
    clock.waited(t1=30.0)
    counted.step()
    assert counted.close() > 0.9 and not caplog.records


def test_counts_that_can_no_longer_be_read_end_nothing(clock, monkeypatch, tmp_path):
    counted = Contention(CPU)
    monkeypatch.setattr(contention, "_THREADS", tmp_path / "elsewhere")
    clock.now += 30
    counted.step()
    assert counted.close() == 0.0


@pytest.mark.parametrize("device, threads, there", [("cuda", 4, True), ("cpu", 1, True), ("cpu", 4, False)])
def test_nothing_is_counted_where_it_says_nothing(clock, monkeypatch, tmp_path, device, threads, there):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    if not there:
        monkeypatch.setattr(contention, "_THREADS", tmp_path / "elsewhere")
    counted = Contention(torch.device(device))
    clock.now += 30
    clock.waited(t1=30.0)
    counted.step()
    assert counted.share() is None


def test_an_odd_line_and_a_thread_that_ends_are_passed_over(clock, tmp_path):
    counted = Contention(CPU)
    (tmp_path / "t1" / "schedstat").write_text("")
    (tmp_path / "t3").mkdir()
    (tmp_path / "t3" / "schedstat").write_text("0 9000000000 0\n")
    (tmp_path / "t4").mkdir()
    clock.now += 10
    clock.waited(t2=51.0)
    assert counted.share() == pytest.approx(0.1)


def test_an_epochs_line_has_its_share(monkeypatch, tmp_path):
    monkeypatch.setattr(Contention, "share", lambda self: 0.25)
    toy = brain(hparams={"output_folder": str(tmp_path)})
    toy.fit([1], ToyTrainLoader(3))
    toy.metrics_log.flush()
    epoch = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert epoch["kind"] == "epoch" and epoch["core_wait_share"] == 0.25


@pytest.mark.slow
@pytest.mark.skipif(not contention._waited(), reason="this system doesn't tell how long threads waited")
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
