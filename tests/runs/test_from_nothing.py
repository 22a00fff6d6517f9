"""A run from trained weights is compared with finished runs from random weights at the same time of training."""

import filecmp
import json
from unittest.mock import Mock

import pytest

from sbkit.runs import from_nothing
from sbkit.score.metric import Metric

MINUTE = 60.0


def write(folder, values, recipe="lr: 1\n", dev="ID,wrd\n1,yes\n", finished=True, name="WER", seconds=MINUTE):
    (folder / "manifests").mkdir(parents=True, exist_ok=True)
    (folder / "manifests" / "dev.csv").write_text(dev)
    (folder / "hyperparams.yaml").write_text(recipe)
    lines = [{"time": 1.0, "kind": "epoch", "epoch": number, "step": number, **more}
             for number, value in enumerate(values, 1)
             for more in ({"train_seconds": seconds}, {f"valid_{name}": value})]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (folder / "tested.json").write_text("{}")
    return folder


@pytest.mark.parametrize("epochs", [1, 2, 3, 4])
def test_it_is_told_once_when_a_run_falls_behind(tmp_path, epochs):
    write(tmp_path / "nothing", [90.0, 60.0, 30.0])
    run = write(tmp_path / "run", [80.0, 64.0, 70.0, 60.0][:epochs], "init_from: x\n", finished=False)
    told = from_nothing.warning(run, Metric("WER"))
    if epochs != 3:  # first better, then within a tenth, then behind, and still so
        assert told == ""
    else:
        assert "the best dev WER is 64.00. From random weights" in told and "nothing had 30.00 by then" in told


def test_less_time_counts_as_less(tmp_path):
    write(tmp_path / "nothing", [90.0, 30.0], seconds=10 * MINUTE)
    run = write(tmp_path / "run", [99.9] * 9, "init_from: x\n")
    assert from_nothing.warning(run, Metric("WER")) == ""
    run = write(tmp_path / "run", [99.9] * 10, "init_from: x\n")
    assert "had 90.00 by then" in from_nothing.warning(run, Metric("WER"))


def test_of_a_metric_that_should_be_high_a_lower_one_is_behind(tmp_path):
    write(tmp_path / "nothing", [0.5], name="accuracy")
    run = write(tmp_path / "run", [0.4], "init_from: x\n", name="accuracy")
    assert "the best dev accuracy is 0.40" in from_nothing.warning(run, Metric("accuracy", lower_is_better=False))
    assert from_nothing.warning(run, Metric("accuracy")) == ""


@pytest.mark.parametrize("broken", ["{", "[]", '{"kind": "epoch"}', "\0"])
def test_a_damaged_run_beside_it_ends_nothing(tmp_path, broken):
    (write(tmp_path / "nothing", [10.0]) / "metrics.jsonl").write_text(broken + "\n")
    (tmp_path / "nothing" / "test_utterances.jsonl").write_text(broken)
    assert from_nothing.warning(write(tmp_path / "run", [90.0], "init_from: x\n"), Metric("WER")) == ""


def test_a_run_beside_it_that_may_not_be_read_ends_nothing(tmp_path, monkeypatch):
    write(tmp_path / "nothing", [10.0])
    monkeypatch.setattr(filecmp, "cmp", Mock(side_effect=PermissionError("dev.csv")))
    assert from_nothing.warning(write(tmp_path / "run", [90.0], "init_from: x\n"), Metric("WER")) == ""


@pytest.mark.parametrize("other", [
    {"dev": "ID,wrd\n1,no\n"}, {"recipe": "init_from: x\n"}, {"recipe": "encoder_source: x\n"}, {"finished": False},
    {"recipe": "pretrainer: !new:collections.Counter\n"}, {"recipe": ": : ["}])
def test_runs_that_are_not_comparable_are_left_out(tmp_path, other):
    write(tmp_path / "nothing", [10.0], **other)
    run = write(tmp_path / "run", [90.0], "init_from: x\n")
    assert from_nothing.warning(run, Metric("WER")) == ""
