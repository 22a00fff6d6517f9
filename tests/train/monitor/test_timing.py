"""The step budget: every moment is counted once, and counting costs next to nothing."""

from __future__ import annotations

import json
import threading
import time

import processes
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from toys import ToyTrainLoader, brain

from sbkit.train.monitor import timing
from sbkit.train.monitor.timing import StepBudget, section


class Clock:
    """Time that passes when told to."""

    def __init__(self, budget: StepBudget):
        self.now_at = 0.0
        budget.clock.now = lambda: self.now_at
        budget.reset()

    def wait(self, seconds: float) -> None:
        self.now_at += seconds


@pytest.fixture
def budget():
    return StepBudget("cpu")


def test_every_moment_counts_once_for_the_inner_section(budget):
    clock = Clock(budget)
    with budget.active():
        for _ in range(2):
            with budget("data"):
                clock.wait(1)
            with budget("forward"):
                clock.wait(2)
                with section("features"):
                    clock.wait(3)
                clock.wait(4)
            clock.wait(5)
            with budget("backward"):
                clock.wait(6)
                with section("forward"):  # activation checkpointing runs it again
                    clock.wait(7)
            budget.step()
    totals = budget.totals()
    assert totals["total"] == 2 * 28 == sum(v for k, v in totals.items() if k != "total")
    assert {k: v for k, v in totals.items() if v and k != "total"} == {
        "data": 2, "forward": 12, "features": 6, "other": 10, "backward": 26}
    assert budget.share("data") == pytest.approx(1 / 28)


def test_the_line_names_all_sections_in_the_order_of_a_step(budget):
    clock = Clock(budget)
    with budget("data"):
        clock.wait(0.1)
    with budget("forward"):
        clock.wait(0.3)
    budget.step()
    assert budget.line() == ("step 400 ms: data 25 %, copy 0 %, features 0 %, forward 75 %, loss 0 %, "
                             "backward 0 %, all-reduce 0 %, optimizer 0 %, other 0 %")
    budget.reset()
    assert budget.line() == "no step was timed"


def test_what_happens_in_a_pause_is_no_part_of_a_step(budget):
    clock = Clock(budget)
    with budget("forward"):
        clock.wait(1)
    with budget.pause():
        clock.wait(100)
    with budget("forward"):
        clock.wait(1)
    budget.step()
    assert budget.totals()["total"] == 2


def test_an_exception_leaves_the_budget_usable(budget):
    clock = Clock(budget)
    with pytest.raises(RuntimeError), budget.active(), budget("forward"), section("features"):
        raise RuntimeError
    with section("features"):  # no budget is active any more
        clock.wait(5)
    with budget("data"):
        clock.wait(1)
    assert budget.totals()["data"] == 1 and budget.totals()["features"] == 0


def test_other_threads_are_not_counted(budget):
    clock = Clock(budget)

    def elsewhere():
        with section("features"):
            clock.wait(5)

    with budget.active(), budget("forward"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert budget.totals()["forward"] == 5


def test_what_follows_the_last_gradient_is_all_reduce(budget):
    clock = Clock(budget)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    weight.register_hook(lambda gradient: clock.wait(2))
    with budget("backward"):
        budget.exposed_all_reduce(loss)
        torch.autograd.backward(loss)
        clock.wait(1)  # as DDP does inside backward, waiting for its buckets
    budget.step()
    totals = budget.totals()
    assert (totals["backward"], totals["all-reduce"]) == (2, 1)
    assert budget.share("backward") == pytest.approx(2 / 3)


def test_a_section_costs_microseconds(budget):
    def lap(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            with budget("data"):
                pass
        budget.step()
        return (time.perf_counter() - start) / times

    assert min(lap(2000) for _ in range(5)) < 20e-6  # about 1 microsecond on an idle machine


class Event:
    """A CUDA event that passes when the test says so."""

    passed_until = 0.0
    host = 0.0

    def __init__(self, enable_timing: bool = False):
        assert enable_timing
        self.at = None

    def record(self, stream=None):
        self.at = Event.host

    def query(self):
        return self.at <= Event.passed_until

    def synchronize(self):
        Event.passed_until = max(Event.passed_until, self.at)

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


def test_on_cuda_events_are_read_after_they_passed_and_used_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    Event.passed_until = Event.host = 0.0
    budget = StepBudget("cuda")
    for _ in range(timing.DRAIN_EVERY * 4):
        with budget("forward"):
            Event.host += 1
        budget.step()
    assert budget.share("forward") is None, "nothing has passed on the device, so nothing may be read"
    Event.passed_until = 10.0
    assert budget.share("forward") == pytest.approx(1.0)
    assert budget.totals(wait=False)["total"] == 10
    assert budget.totals()["total"] == timing.DRAIN_EVERY * 4  # waits
    spare = len(budget.clock.spare)
    with budget("forward"):
        Event.host += 1
    assert len(budget.clock.spare) < spare


def all_reduce_seconds():
    """Seconds of a rank's all-reduce in three steps; rank 1 is late for each by 0.3 s."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    budget = StepBudget("cpu")
    for step in range(4):
        loss = model(torch.randn(8, 64)).sum()
        if dist.get_rank() == 1:
            time.sleep(0.3)  # the other rank, done with its gradients, waits for this one's
        if step == 1:
            budget.reset()
        with budget("backward"):
            budget.exposed_all_reduce(loss)
            loss.backward()
        budget.step()
    return budget.totals()["all-reduce"]


@pytest.mark.slow
def test_waiting_for_another_rank_shows_as_all_reduce():
    first, second = processes.results(all_reduce_seconds)
    assert first > second + 0.3


def test_perfetto_can_draw_every_span_of_a_profile(tmp_path):
    """It leaves out a span that begins in one and ends outside it, so all of a thread's must lie within each other."""
    toy = brain(hparams={"output_folder": str(tmp_path)}, profile_training=True, profile_warmup=1, profile_steps=2)
    with pytest.raises(SystemExit):
        toy.fit([1], ToyTrainLoader(6))
    path, = (tmp_path / "profiler_logs").glob("*.json")
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    names = [span["name"] for span in spans]
    for name in ("data", "forward", "loss", "backward", "optimizer"):
        assert names.count(name) == 2
    threads = {}
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        around = threads.setdefault((span["pid"], span["tid"]), [])
        while around and around[-1] <= span["ts"]:
            around.pop()
        assert not around or span["ts"] + span["dur"] <= around[-1], span
        around.append(span["ts"] + span["dur"])
