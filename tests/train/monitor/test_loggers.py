"""What TensorBoard, Weights & Biases, MLflow and trackio have of a run, without a network; and a tool that fails."""

import configparser
import json
import logging
import os
import re
import sqlite3
import sys
from pathlib import Path
from unittest import mock

import processes
import pytest
import torch
from refusals import refused

from sbkit.train.monitor import loggers
from sbkit.train.monitor.loggers import Run
from sbkit.train.monitor.metrics import MetricsLog

ROOT = Path(__file__).parents[3]
RECIPE = {"experiment": "words", "lr": 0.001, "precision": "bf16"}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Where each tool keeps what it is told."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path / "trackio"),
                        "WANDB_DATA_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path),
                        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
                        "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
        monkeypatch.setenv(name, value)


def written(folder, names):
    """The log of a run in a folder."""
    return MetricsLog(folder, loggers.make(names, Run(folder, RECIPE)))


def run_twice(folder, name):
    """A run that was killed after step 20 and goes on from step 10."""
    folder.mkdir()
    first = written(folder, [name])
    first.write("run", event="start")
    for step in (10, 20):
        first.write("step", step=step, loss=torch.tensor(5.0 - step / 10), note="text is left out")
    first.flush()
    again = written(folder, [name])
    again.write("step", step=20, loss=3.5)
    again.write("epoch", epoch=1, valid_WER=12.5)
    again.write("test", test_WER=11.0, step=20)
    again.close()
    first.close()
    return (folder / "loggers.txt").read_text().strip() if (folder / "loggers.txt").exists() else ""


def test_tensorboard(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_twice(tmp_path / "run", "tensorboard")
    events = reader.EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["epoch/valid_WER", "step/loss", "test/test_WER"]
    assert {event.step: event.value for event in events.Scalars("step/loss")} == {10: 4.0, 20: 3.5}


@pytest.mark.slow
def test_mlflow_has_one_run_with_its_recipe_and_both_starts(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    name = run_twice(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("words").experiment_id])
    assert found.info.run_name == f"run-{name}" and found.info.status == "FINISHED"
    assert found.data.params == {"experiment": "words", "lr": "0.001", "precision": "bf16"}
    assert found.data.metrics == {"step/loss": 3.5, "epoch/valid_WER": 12.5, "test/test_WER": 11.0}
    assert [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, "step/loss")] \
        == [(10, 4.0), (20, 3.0), (20, 3.5)]


@pytest.mark.slow
def test_trackio_has_one_run(tmp_path):
    pytest.importorskip("trackio")
    name = run_twice(tmp_path / "run", "trackio")
    (path,) = (tmp_path / "trackio").glob("words*.db")
    rows = sqlite3.connect(path).execute("select run_name, step, metrics from metrics order by id").fetchall()
    values = [(step, json.loads(values)) for run, step, values in rows if run == f"run-{name}"]
    assert len(values) == len(rows) and (20, {"step/loss": 3.5}) in values and (20, {"epoch/valid_WER": 12.5}) in values


def start(folder, step, end):
    log = written(Path(folder), ["wandb"])
    log.write("step", step=int(step), loss=4.0)
    if end == "killed":
        log.flush()
        os.kill(os.getpid(), 9)
    log.write("epoch", epoch=1, valid_WER=12.5)
    log.close()


@pytest.mark.long
@pytest.mark.slow
def test_wandb_keeps_a_killed_run_and_its_second_start_under_one_name_without_a_network(tmp_path):
    """Each start is a process, as of a run: within one, wandb goes on with what is open."""
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    folder.mkdir()
    settings = {name: value for name, value in os.environ.items() if name.startswith("WANDB")}
    for step, end, code in (("10", "killed", -9), ("20", "", 0)):
        done = processes.program(start, str(folder), step, end, **settings)
        assert done.returncode == code, done.stderr
    name = (folder / "loggers.txt").read_text().strip()
    kept = sorted(folder.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb"))
    assert len(kept) == 2 and b"valid_WER" in kept[1].read_bytes()  # of the first it hadn't written all yet


WITH_A_TOOL = {name: kind.module for name, kind in loggers.KINDS.items() if kind.module is not None}


@pytest.mark.parametrize(("extra", "name"), WITH_A_TOOL.items())
def test_a_tool_that_is_not_installed_is_one_clear_error(tmp_path, monkeypatch, name, extra):
    monkeypatch.setitem(sys.modules, name, None)
    with refused("missing-package", key="loggers", value=extra) as error:
        loggers.make([extra], Run(tmp_path, {}))
    assert error.value.hint == f"pip install 'sbkit[{extra}]'"


@pytest.mark.parametrize("name", loggers.KINDS)
def test_each_name_is_an_extra_and_on_the_page_about_them(name):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert name not in WITH_A_TOOL or name in setup["options.extras_require"], "the hint says how to install it"
    (listed,) = re.findall(r"`loggers: \[(.*?)\]`", (ROOT / "docs" / "reference" / "formats.md").read_text())
    assert name in listed.split(", ")


@pytest.mark.parametrize("name", [".Csv", "..Csv", "mine..Csv", "mine."])
def test_a_name_that_no_class_can_have_is_refused_with_the_recipe(name):
    assert [name] not in loggers.NAMES


class Silent(loggers.Logger):
    """It sends nothing."""


class Lines(loggers.Logger):
    """A tool of one's own: a file with a line for each number."""

    buffers = True

    def _begin(self, step):
        self._open = (self.run.folder / "lines.txt").open("a")
        self._open.write(f"from {step}\n")

    def _log(self, values, step, seconds):
        self._open.writelines(f"{step} {name} {value}\n" for name, value in values.items())

    def _close(self):
        self._open.close()


def test_a_class_of_ones_own_is_told_from_where_on_a_resumed_run_sends_numbers_again(tmp_path):
    assert [f"{__name__}.Lines", "wandb"] in loggers.NAMES and ["wand"] not in loggers.NAMES
    run_twice(tmp_path / "run", f"{__name__}.Lines")
    assert (tmp_path / "run/lines.txt").read_text().splitlines() == [
        "from 10", "10 step/loss 4.0", "20 step/loss 3.0",
        "from 20", "20 step/loss 3.5", "20 epoch/valid_WER 12.5", "20 test/test_WER 11.0"]


def test_a_module_that_a_class_of_ones_own_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Lines, "module", "no_such")
    with refused("missing-package", key="loggers") as error:
        loggers.make([f"{__name__}.Lines"], Run(tmp_path, {}))
    assert error.value.hint == "install what has the module no_such"


@pytest.mark.parametrize("name", ["no_such.Csv", f"{__name__}.Csv", f"{__name__}.RECIPE", f"{__name__}.Silent"])
def test_a_name_of_no_logger_is_one_clear_error(tmp_path, name):
    with refused("bad-logger", key="loggers", value=name):
        loggers.make([name], Run(tmp_path, {}))


@pytest.mark.parametrize("failure", [ConnectionError("no route to host"), ValueError("401: who are you?"),
                                     SystemExit(1), OSError(28, "No space left on device")])
def test_a_tool_that_fails_does_not_end_the_run_and_is_reported_once(tmp_path, monkeypatch, caplog, failure):
    monkeypatch.setitem(sys.modules, "trackio", mock.Mock(init=mock.Mock(side_effect=failure)))
    log = written(tmp_path, ["trackio"])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            log.write("step", step=step, loss=1.0)
        log.close()
    (record,) = caplog.records
    assert "loggers: trackio failed, so the run continues without it" in record.message
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3
