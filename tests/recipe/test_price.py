"""What a run will take is predicted from finished runs, with an interval, and compared with what it took."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import run_folders
from hypothesis import given
from hypothesis import strategies as st
from trained_runs import here

from sbkit import cli
from sbkit.recipe import finished_runs, price
from sbkit.recipe.finished_runs import FinishedRun, RunEstimate, Setting, Steps
from sbkit.recipe.price import PriceRequest
from sbkit.recipe.speed import flops
from sbkit.tasks.ctc import CTC

ROOT = Path(__file__).parents[2]
CPU = Setting("Some CPU", "bf16", 1, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))


def finished(gflop, seconds, setting=CPU, predicted=None, audio=12.0, task=""):
    """A run of 100 steps; its evaluations of 120 s take as long as training on them."""
    steps = Steps(gflop * 1e9, 1, audio, 100, 120.0, task)
    return FinishedRun(setting, steps, seconds, (100 + 120 / audio) * seconds / 3600, predicted)


@given(st.floats(1e-3, 1.0), st.lists(st.tuples(st.floats(1, 1000), st.floats(1, 100)), min_size=4, max_size=12))
@pytest.mark.slow
def test_seconds_as_the_flops_are_found_from_any_runs(speed, sizes):
    kinds = [[finished(gflop, speed * gflop, audio=audio)] for gflop, audio in sizes]
    for run in (finished(gflop, speed * gflop, audio=audio) for gflop, audio in [*sizes, (5000, 3)]):
        assert math.isclose(price.fit(kinds, run.steps)[0], run.step_seconds, rel_tol=1e-6)


@given(st.floats(0.2, 0.9), st.floats(0.0, 0.3))
@pytest.mark.slow
def test_larger_matrices_at_a_higher_speed_are_found(a, b):
    def run(gflop, audio):
        return finished(gflop, 0.02 * gflop**a * audio**b, audio=audio)

    sizes = [(gflop, audio) for gflop in (2, 10, 50) for audio in (4, 12, 60)]
    kinds = [[run(*each)] for each in sizes]
    for wanted in (run(*each) for each in [*sizes, (100, 20)]):
        step_seconds, evaluation, _ = price.fit(kinds, wanted.steps)
        assert math.isclose(step_seconds, wanted.step_seconds, rel_tol=0.07)
        assert evaluation == pytest.approx(1.0)
        steps = dataclasses.replace(wanted.steps, operations=8 * wanted.steps.operations, micro_batches=8,
                                    audio=8 * wanted.steps.audio)
        assert price.fit(kinds, steps)[0] == pytest.approx(8 * step_seconds)


@given(st.lists(st.tuples(st.floats(1, 1000), st.floats(1e-3, 10)), min_size=4, max_size=8), st.floats(1, 1000))
def test_a_prediction_is_no_extreme(runs, gflop):
    """However runs contradict each other: not faster or slower than all, at their speed or at their seconds."""
    steps = finished(gflop, 1.0).steps
    found = price.fit([[finished(*run)] for run in runs], steps)[0]
    least = min(min(seconds, seconds * gflop / size) for size, seconds in runs)
    most = max(max(seconds, seconds * gflop / size) for size, seconds in runs)
    assert 0.999 * least <= found <= 1.001 * most


@given(st.floats(1.2, 3.0), st.floats(2, 80))
def test_a_task_that_takes_longer_for_its_flops_is_told_apart(slower, gflop):
    speeds = {"CTC": 0.01, "Enhancement": 0.01 * slower}
    kinds = [[finished(size, speed * size, task=task)] for task, speed in speeds.items() for size in (3, 9, 27, 70)]
    without_runs = {"TTS": 0.01 * slower**0.5, "": 0.01 * slower**0.5}
    for task, speed in (speeds | without_runs).items():
        steps = finished(gflop, 1.0, task=task).steps
        assert price.fit(kinds, steps)[0] == pytest.approx(speed * gflop, rel=0.05)


def test_runs_of_another_size_count_little():
    runs = [finished(gflop, 0.01 * gflop) for gflop in (5, 10, 20, 40)]
    steps = finished(15, 1.0).steps
    spoilt, _, _ = price.fit([[run] for run in (*runs, finished(0.01, 0.03))], steps)  # a moment's, on next to nothing
    assert spoilt == pytest.approx(0.15, rel=0.1)


@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=60))
def test_the_interval_holds_the_share_that_it_says(ratios):
    factor = price.width(ratios)
    inside = sum(1 / factor * (1 - 1e-9) <= ratio <= factor * (1 + 1e-9) for ratio in ratios)
    assert inside / len(ratios) >= price.COVERAGE


def test_a_model_that_is_trained_often_counts_once():
    others = [finished(gflop, 0.01 * gflop) for gflop in (5, 10, 20)]
    often = [finished(40, 0.8)] * 50
    assert [len(kind) for kind in price.group_by_steps([*others, *often])] == [1, 1, 1, 50]
    once, many = (price.fit(price.group_by_steps([*others, *runs]), often[0].steps) for runs in (often[:1], often))
    assert many == pytest.approx(once)


def test_too_few_runs_are_a_guess_from_the_limits_of_the_device():
    steps = Steps(35e9, 1, 12.0, 100, 120.0)
    prediction = price.predict(steps, [finished(10, 0.1)] * 9, peak=100e9, least=0.5)  # nine runs of one kind
    assert prediction.by == "limits" and prediction.step_seconds == 0.5
    assert prediction.high / prediction.hours == prediction.hours / prediction.low == pytest.approx(price.GUESS_FACTOR)
    assert price.predict(steps, [], peak=None) is None


def test_enough_runs_are_fitted_and_their_errors_make_the_interval():
    runs = [finished(gflop, 0.01 * gflop) for gflop in (5, 10, 20, 40)]
    prediction = price.predict(finished(30, 1.0).steps, runs, peak=1e12)
    assert prediction.by == "fit" and prediction.step_seconds == pytest.approx(0.3)
    assert price.MIN_FACTOR < prediction.high / prediction.hours < 1.06
    far = price.predict(finished(3000, 1.0).steps, runs, peak=1e12)
    assert far.step_seconds == pytest.approx(30.0) and far.high / far.hours > 1.1
    growing = [finished(gflop, 0.05 * gflop**0.5) for gflop in (5, 10, 20, 40)]  # at up to 126 GFLOP a second
    for peak, seconds in ((200e9, 15.0), (30e9, 3000 / (40**0.5 / 0.05))):  # at the peak; one measured on a busy core
        assert price.predict(finished(3000, 1.0).steps, growing, peak).step_seconds == pytest.approx(seconds)
    apart = [finished(gflop, seconds) for gflop, seconds in ((5, 0.05), (10, 0.2), (20, 0.1), (40, 0.4))]
    assert price.predict(finished(30, 1.0).steps, apart, peak=1e12).high / prediction.hours > 1.5


def test_trial_steps_are_scaled_by_what_runs_took_of_theirs():
    steps = finished(30, 1.0).steps
    assert price.predict(steps, [], None, trial=0.2).high == pytest.approx(110 * 0.2 * price.TRIAL_FACTOR / 3600)
    runs = [finished(gflop, 0.012 * gflop, predicted=RunEstimate(0.0, 1.0, 1.0, 1.0, "trial", 0, 0.01 * gflop))
            for gflop in (5, 10, 20, 40)]
    prediction = price.predict(steps, runs, None, trial=0.2)
    assert prediction.step_seconds == pytest.approx(0.24) and prediction.hours == pytest.approx(110 * 0.24 / 3600)
    assert prediction.runs == 4 and prediction.high / prediction.hours == pytest.approx(price.MIN_FACTOR)


def test_cost_and_energy_are_of_all_devices():
    card = Setting("Card", "bf16", 0, 8)
    prediction = RunEstimate(3.6, 10.0, 5.0, 20.0, "peak")
    steps = Steps(1e12, 1, 12.0, 9000, 1.0)
    table = price.section(PriceRequest(2.5, 8, "Card", watts={"Card": 700}), card, steps, prediction)
    assert table.rows[2:] == [["time of the run", "10 h", "5 h", "20 h"],
                              ["cost of 8 devices at 2.5 an hour each", "200.0", "100.0", "400.0"],
                              ["kWh at most, at 700 W per device", "56.0", "28.0", "112.0"]]
    assert table.values["cost"] == 200.0 and table.values["kwh_at_most"] == 56.0
    assert "too few to fit" in table.remarks[0]
    small = Steps(1e9, 1, 2.74, 26, 1.0)
    tiny = price.section(PriceRequest(2.5), CPU, small, RunEstimate(0.005, 7.7e-5, 5e-5, 1e-4, "trial"))
    assert [row[1] for row in tiny.rows] == ["0.13 s", "0.15 s", "0.28 s", "under 0.01"]
    free = price.section(PriceRequest(0.0), CPU, small, RunEstimate(0.005, 1.0, 0.5, 2.0, "trial"))
    assert free.rows[-1][1:] == ["0", "0", "0"]
    assert "scaled to the 2.74 s of audio that a step of this run has" in tiny.remarks[0]
    here = price.section(PriceRequest(2.5), CPU, steps, prediction)
    assert not any("kWh" in row[0] for row in here.rows) and here.values["kwh_at_most"] is None
    for high, far in ((14.0, False), (130.0, True)):
        prediction = RunEstimate(3.6, 10.0, 1.0, high, "fit", 20)
        fitted = price.section(PriceRequest(2.5), CPU, steps, prediction)
        assert ("20 finished runs on Some CPU in bf16, 1 thread, whose steps differ much in size" in
                fitted.remarks[0]) is far


@pytest.mark.long
@pytest.mark.slow
def test_a_check_predicts_the_very_run_that_follows(tmp_path, capsys, monkeypatch):
    run_folders.corpus(tmp_path / "data", 3.0, train=8, dev=2, test=2)
    out = tmp_path / "out"
    words = [str(ROOT / "hparams" / "ctc.yaml"), "--d_model", "16", "--nhead", "2", "--num_encoder_layers", "1",
             "--d_ffn", "16", "--least_steps", "0", "--number_of_epochs", "2", "--num_workers", "0",
             "--max_batch_seconds", "40", "--step_seconds", "40",
             "--data_folder", str(tmp_path / "data"), "--output_folder", str(out), "--device", "cpu"]
    assert cli.main(["prepare", *words]) == 0
    capsys.readouterr()
    assert cli.main(["check", *words, "--price", "2.5", "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)["sections"]
    assert not [row for row in sections["cost"]["rows"] if row[0].startswith("hours")], "they are the price's"
    values = sections["price"]["values"]
    assert values["by"] == "limits" and values["cost"] == 2.5 * values["hours"] and values["kwh_at_most"] is None
    monkeypatch.setenv("COUNT_FLOPS", "1")
    said = here("train", *words[:-2], "--no-check")
    per_second = flops(sections["cost"]["values"]["operations_per_second_of_audio"])
    assert f"a second of audio takes {per_second} in training" in said
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    monkeypatch.setattr(finished_runs, "MIN_SECONDS", 0.0)
    assert finished_runs.record(lines, CTC, values["threads"], 120.0, 3.5, 3.5)  # it was too short
    run = finished_runs.read()[-1]
    assert run.steps.steps == values["steps"] and run.predicted.hours == values["hours"]
    with open(finished_runs.table_file(), "a") as table:
        for wider in (2, 4, 8):
            steps = dataclasses.asdict(dataclasses.replace(run.steps, operations=wider * run.steps.operations))
            table.write(json.dumps({"format": finished_runs.FORMAT, "kind": "run", "setting": run.setting._asdict(),
                                    "steps": steps, "step_seconds": 60.0 * wider, "hours": 1.0,
                                    "predicted": None}) + "\n")
    runs = finished_runs.read()
    capsys.readouterr()
    assert cli.main(["check", *words, "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["sections"]["cost"]
    by = price.predict(run.steps, runs, None)
    hours = cost["values"]["hours_per_100_hours"] / 100 * cost["values"]["audio_hours_per_epoch"] * 2
    assert hours == pytest.approx(run.steps.steps * by.step_seconds / 3600, rel=0.1)
    assert f"that of training, from {len(runs)} finished runs here" in cost["remarks"][0]
