"""A finished run adds what it computed and took to a file, beside what a check had predicted; no other run does."""

import dataclasses
import json

import pytest

from sbkit.recipe import finished_runs, price
from sbkit.recipe.finished_runs import RunEstimate, Setting, Steps
from sbkit.tasks.ctc import CTC

CPU = Setting("Some CPU", "bf16", 1, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))


def log(**changes):
    """The log of a run of two epochs of 50 steps."""
    run = {"kind": "run", "time": 1000.0, "device": "cpu", "precision": "bf16", "devices": 1,
           "environment": {"cpu": f"{CPU.device}, 2 cores"}}
    epoch = {"kind": "epoch", "train_seconds": 10.0, "audio_s_per_s": 50.0, "flops_per_s": 50e9, "padding_share": 0.5}
    return [run, *({**epoch, "step": step, **changes} for step in (50, 100)), {"kind": "epoch", "valid_loss": 1.0},
            {"kind": "test", "time": 1028.0}]


def recorded(lines):
    return finished_runs.record(lines, CTC, 1, max_batch_seconds=120.0, dev_seconds=100.0, test_seconds=200.0)


def test_a_finished_run_adds_a_line():
    assert recorded(log())
    (run,) = finished_runs.read()
    assert run.setting == CPU
    assert run.steps == Steps(operations=20e9, micro_batches=1, audio=20.0, steps=100, evaluated=400.0, task="CTC")
    assert run.step_seconds == pytest.approx(0.2) and run.hours == pytest.approx(28 / 3600)
    assert run.evaluation == pytest.approx(8 / (400 * 0.2 / 20))
    assert "epoch" not in finished_runs.table_file().read_text()


@pytest.mark.parametrize("lines", [
    [log()[0], *log()],  # resumed: it started twice
    log()[:-1],  # not tested
    [*log(), log()[-1]],
    log(flops_per_s=None),
    [*log()[:-1], {"kind": "test", "time": 1009.0}],
    [line for line in log() if line["kind"] != "epoch"],
], ids=["resumed", "killed", "tested twice", "uncounted", "short", "untrained"])
def test_other_runs_spoil_nothing(lines):
    assert not recorded(lines)
    assert finished_runs.read() == []


def test_a_run_is_joined_with_the_last_prediction_for_it():
    steps = Steps(20e9, 1, 20.0, 100, 400.0, "CTC")
    for hours in (1.0, 0.0080):
        finished_runs.store_prediction(CPU, steps, RunEstimate(0.2, hours, 0.9 * hours, 1.1 * hours, "peak"))
    finished_runs.store_prediction(CPU, dataclasses.replace(steps, steps=200), RunEstimate(0.2, 3.0, 2.0, 4.0, "peak"))
    finished_runs.store_prediction(CPU._replace(precision="fp32"), steps, RunEstimate(0.2, 3.0, 2.0, 4.0, "peak"))
    assert recorded(log())
    assert finished_runs.read()[0].predicted.hours == 0.0080
    assert price.summary(finished_runs.read()) == \
        ("1 finished run, 1 predicted: off by 3%, 1 of 1 within their interval", True)


@pytest.mark.parametrize("wrong", [
    {"format": 0}, {"setting": None}, {"steps": {}}, {"step_seconds": None}, {"step_seconds": 0},
    {"hours": float("nan")}, {"hours": float("inf")}, {"steps": {"micro_batches": 0}}, {"steps": {"evaluated": None}},
    {"steps": {"more": 1}}], ids=str)
@pytest.mark.parametrize("kind", ["run", "check"])
def test_lines_that_say_nothing_are_left_out(kind, wrong):
    assert recorded(log())
    good = finished_runs.table_file().read_text()
    line = json.loads(good) | {"kind": kind} | wrong
    if wrong.get("steps"):
        line["steps"] = json.loads(good)["steps"] | wrong["steps"]
    finished_runs.table_file().write_text("\n".join([
        "{", "[]", json.dumps({"format": finished_runs.FORMAT, "kind": kind}), json.dumps(line), good]))
    assert recorded(log()), "no prediction is taken from such a line either"
    assert [run.predicted for run in finished_runs.read()] == [None, None]


def test_a_task_of_your_own_is_named_by_the_one_that_it_derives_from():
    class Mine(CTC):
        pass

    assert finished_runs.steps_of(Mine, 1e9, 12.0, 120.0, 100, 120.0).task == "CTC"


def test_a_line_from_before_tasks_were_written_is_read():
    assert recorded(log())
    line = json.loads(finished_runs.table_file().read_text())
    del line["steps"]["task"]
    finished_runs.table_file().write_text(json.dumps(line) + "\n")
    assert recorded(log())
    old, new = finished_runs.read()
    assert old.steps == dataclasses.replace(new.steps, task="")


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "file"))
    assert recorded(log())
    assert finished_runs.read() == []
