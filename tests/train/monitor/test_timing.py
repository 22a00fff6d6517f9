"""One step in so many is timed by sections, by events on a card, and reading them waits for nothing."""

from __future__ import annotations

import gc
import json

import pytest
from toys import ToyTrainLoader, brain

from sbkit.train.monitor import timing
from sbkit.train.monitor.timing import EVERY, FIRST, StepTimes


@pytest.fixture
def clock(monkeypatch):
    moments = iter(range(0, 1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(moments)))


def test_a_timed_step_is_divided_into_sections(clock):
    times = StepTimes("cpu")
    assert times.line() == "" and times.data_share() is None
    for _ in range(2):
        times.begin(FIRST)
        for section in ("data", "forward", "loss", "data", "forward", "loss", "backward", "optimizer"):
            times.mark(section)
    assert times.totals() == {"data": 4, "forward": 4, "loss": 4, "backward": 2, "optimizer": 2}
    assert times.line().startswith("step 8.00 s: data 25 %, forward 25 %") and times.data_share() == 0.25
    times.reset()
    assert sum(times.totals().values()) == 0 and times.timed == 0


def test_a_run_times_one_step_in_so_many(tmp_path):
    toy = brain(hparams={"output_folder": str(tmp_path)})
    toy.fit([1], ToyTrainLoader(steps=2 * EVERY))
    (line,) = [each for each in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
               if each["kind"] == "epoch"]
    assert sum(line["time_shares"].values()) == pytest.approx(1, abs=0.02)
    toy.fit([2], ToyTrainLoader(steps=FIRST))  # none of these is timed
    assert "time_shares" not in json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])


class Event:
    """An event of a card that runs behind the host: what it is past is up to ``passed``."""

    now, passed, waited = 0.0, -1.0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.at, Event.now = Event.now, Event.now + 1

    def query(self):
        return self.at <= Event.passed

    def synchronize(self):
        Event.waited, Event.passed = Event.waited + 1, self.at

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


def test_on_a_card_what_has_not_passed_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "current_stream", lambda device: None)
    times = StepTimes("cuda")
    times.begin(FIRST)
    for section in ("data", "forward", "loss", "backward", "optimizer"):
        times.mark(section)
    assert times.data_share() is None and Event.waited == 0
    Event.passed = 2.0
    assert times.data_share() == 0.5 and Event.waited == 0
    assert times.totals()["optimizer"] == 1 and Event.waited == 1


def test_events_of_a_card_do_not_pile_up_on_a_rank_that_shows_nothing(monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "current_stream", lambda device: None)
    times = StepTimes("cuda")
    for _ in range(20):
        times.begin(FIRST)
        for section in ("data", "forward", "loss", "backward", "optimizer"):
            times.mark(section)
        Event.passed = Event.now
    assert sum(isinstance(each, Event) for each in gc.get_objects()) < 15
    assert times.totals()["data"] == 20


def test_the_profiler_writes_a_trace_and_ends_the_run(tmp_path):
    toy = brain(hparams={"output_folder": str(tmp_path)}, profile_training=True, profile_warmup=1, profile_steps=2)
    with pytest.raises(SystemExit):
        toy.fit([1], ToyTrainLoader(6))
    path, = (tmp_path / "profiler_logs").glob("*.json")
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert any("backward" in str(name).lower() for name in names) and toy.optimizer_step == 3
