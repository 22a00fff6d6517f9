"""metrics.jsonl and train_log.txt: whole lines, nothing lost and nothing twice after a resume."""

from __future__ import annotations

import itertools
import json
import os
import time
from unittest import mock

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from processes import Beside
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.train_logger import FileTrainLogger
from toys import load, save

from sbkit.train.monitor import metrics
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.resumable_file import ResumableFile
from sbkit.train.train_log import TrainLog


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_line_holds_what_was_measured(tmp_path):
    log = MetricsLog(tmp_path)
    before = time.time()
    log.write("step", epoch=1, step=50, loss=torch.tensor(1.5), lr=1e-3, grad_norm=torch.tensor(float("nan")),
              memory=float("inf"), extras={"ctc": torch.tensor(2.0).item(), ("es", 1): None},
              skipped_steps=0, note="größer")
    (line,) = lines(tmp_path)
    assert line.pop("time") >= before - 0.01
    assert line == {"kind": "step", "epoch": 1, "step": 50, "loss": 1.5, "lr": 1e-3, "grad_norm": None,
                    "memory": None, "extras": {"ctc": 2.0, "('es', 1)": None}, "skipped_steps": 0, "note": "größer"}


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "if_main_process", lambda: False)
    log = MetricsLog(tmp_path)
    log.write("step", step=1)
    log.close()
    assert not log.path.exists()


def test_lines_that_a_full_disk_refuses_wait_until_there_is_room(tmp_path, caplog):
    log = MetricsLog(tmp_path)
    log.path.symlink_to("/dev/full")
    log.write("step", step=1)
    log.write("step", step=2)
    assert caplog.text.count(f"{log.path} could not be written: No space left on device (free: ") == 1
    log.path.unlink()
    log.write("step", step=3)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_line_that_a_full_disk_cut_off_is_written_again(tmp_path):
    file, write = ResumableFile(tmp_path / "log", lambda line: True), os.write
    with mock.patch.object(os, "write", lambda handle, data: write(handle, data[:3])):
        file.append("first")
    assert file.path.read_text() == "fir"
    file.append("second")
    assert file.path.read_text() == "first\nsecond\n"


def test_lines_wait_for_their_values_in_order(tmp_path, monkeypatch):
    class Slow(metrics.Peek):
        ready = False

    log = MetricsLog(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(metrics, "Peek", Slow)
        log.write("step", step=1, loss=torch.tensor(1.0))
        log.write("step", step=2)
        assert not log.path.exists()
        log.flush()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_resumed_run_continues_where_its_checkpoint_stood(tmp_path):
    first = MetricsLog(tmp_path)
    first.write("run", event="start")
    first.write("step", step=1)
    keeper = Checkpointer(tmp_path / "save", {"metrics": first})
    keeper.save_checkpoint()
    first.write("step", step=2)
    first.write("epoch", epoch=1)
    first.write("warning", step=2)
    first.write("test", wer=30.0)

    again = MetricsLog(tmp_path)
    Checkpointer(tmp_path / "save", {"metrics": again}).recover_if_possible()
    again.write("run", event="resume")
    again.write("step", step=2, second=True)
    again.write("step", step=3)
    kinds = [(line["kind"], line.get("step")) for line in lines(tmp_path)]
    assert kinds == [("run", None), ("step", 1), ("test", None), ("run", None), ("step", 2), ("step", 3)]


def test_evaluating_an_older_checkpoint_drops_nothing(tmp_path):
    trained = MetricsLog(tmp_path)
    trained.write("epoch", epoch=1)
    save(trained, tmp_path / "best")
    trained.write("epoch", epoch=2)
    load(trained, tmp_path / "best", end_of_epoch=True)  # evaluate() in the same process
    trained.write("test", wer=1.0)
    later = MetricsLog(tmp_path)
    load(later, tmp_path / "best", end_of_epoch=True)  # --test_only
    later.write("test", wer=1.0)
    assert [line["kind"] for line in lines(tmp_path)] == ["epoch", "epoch", "test", "test"]


def test_a_checkpoint_right_after_a_resume_holds_the_same_place(tmp_path):
    log = ResumableFile(tmp_path / "log", lambda line: True)
    log.append("one")
    log.save(tmp_path / "a")
    log.append("two")
    again = ResumableFile(tmp_path / "log", lambda line: True)
    again.load(tmp_path / "a")
    again.save(tmp_path / "b")
    third = ResumableFile(tmp_path / "log", lambda line: True)
    third.load(tmp_path / "b")
    third.append("two, anew")
    assert (tmp_path / "log").read_text() == "one\ntwo, anew\n"


@pytest.mark.parametrize("broken", ["{\"kind\": \"st", "x" * 200_000])
def test_an_incomplete_line_from_a_crash_is_dropped(tmp_path, broken):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n' + broken, encoding="utf-8")
    MetricsLog(tmp_path).write("step", step=2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_deleted_log_is_created_again(tmp_path):
    log = MetricsLog(tmp_path)
    log.write("step", step=1)
    save(log, tmp_path / "checkpoint")
    log.path.unlink()
    again = MetricsLog(tmp_path)
    load(again, tmp_path / "checkpoint", end_of_epoch=False)
    again.write("step", step=2)
    assert [line["step"] for line in lines(tmp_path)] == [2]


def writes_for_ever(pipe, folder):
    log = MetricsLog(folder)
    for step in itertools.count(1):
        log.write("step", step=step, text="x" * 5000)


@pytest.mark.slow
def test_a_kill_leaves_whole_lines(tmp_path):
    path, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 60
    with Beside(writes_for_ever, tmp_path) as other:
        while time.monotonic() < deadline and not (path.exists() and path.stat().st_size > 1_000_000):
            time.sleep(0.05)
        other.kill()
    MetricsLog(tmp_path).write("run")
    steps = [line["step"] for line in lines(tmp_path) if line["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 100


STATS = [
    ({"epoch": 1, "lr": 1e-3, "steps": 100}, {"loss": 12.345}, {"loss": 0.5, "WER": 101.5}, None),
    ({"epoch": 2, "lr": 0.05}, {"loss": 1.0}, None, None),
    ({"Epoch loaded": 2}, None, None, {"loss": 3, "CER": 7.77, "note": "a - b"}),
]


def test_train_log_is_speechbrains_to_the_byte_and_is_shown_without_exponents(tmp_path, caplog):
    loggers = load_hyperpyyaml(f"""
theirs: !new:speechbrain.utils.train_logger.FileTrainLogger
    save_file: {tmp_path}/theirs.txt
ours: !new:sbkit.train.train_log.TrainLog
    save_file: {tmp_path}/new/ours.txt
""")
    assert isinstance(loggers["ours"], FileTrainLogger)
    for meta, train, valid, test in STATS:
        for one in loggers.values():
            one.log_stats(meta, train_stats=train, valid_stats=valid, test_stats=test)
    assert (tmp_path / "new/ours.txt").read_bytes() == (tmp_path / "theirs.txt").read_bytes()
    assert [record.getMessage() for record in caplog.records if record.name == "sbkit.train.train_log"] == [
        "epoch: 1, lr: 0.001, steps: 100 - train loss: 12.35 - valid loss: 0.5, valid WER: 101.50",
        "epoch: 2, lr: 0.05 - train loss: 1.00", "Epoch loaded: 2 - test loss: 3, test CER: 7.77, test note: a - b"]


def test_train_log_of_a_resumed_run_has_each_epoch_once(tmp_path):
    file = tmp_path / "train_log.txt"
    log = TrainLog(file)
    keeper = Checkpointer(tmp_path / "save", {"train_log": log})
    log.log_stats({"epoch": 1}, {"loss": 2.0}, {"WER": 50.0})
    keeper.save_checkpoint()
    log.log_stats({"epoch": 2}, {"loss": 1.0}, {"WER": 40.0})  # killed before the checkpoint of epoch 2
    again = TrainLog(file)
    Checkpointer(tmp_path / "save", {"train_log": again}).recover_if_possible()
    again.log_stats({"epoch": 2}, {"loss": 1.5}, {"WER": 41.0})
    again.log_stats({"Epoch loaded": 2}, test_stats={"WER": 42.0})
    assert file.read_text() == (
        "epoch: 1 - train loss: 2.00 - valid WER: 50.00\n"
        "epoch: 2 - train loss: 1.50 - valid WER: 41.00\n"
        "Epoch loaded: 2 - test WER: 42.00\n")
