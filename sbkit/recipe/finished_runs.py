"""The file of this machine's finished runs: what they computed, how long they took, and what a check predicted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sbkit.system.disk import cache_folder

logger = logging.getLogger(__name__)

FORMAT = 1
#: Seconds of the shortest run that counts: most of a shorter one is start and end.
MIN_SECONDS = 10.0
#: Relative difference of operations and audio within which steps of two runs count as the same: torch's counts vary.
TOLERANCE = 0.02


class Setting(NamedTuple):
    """The device and settings of a run; only runs of the same setting are compared."""

    device: str
    precision: str
    threads: int
    processes: int


@dataclass(frozen=True)
class Steps:
    """The work of a run's steps on one device, and the audio of its evaluations.

    operations : floating point operations of a step
    micro_batches : of a step
    audio : seconds of audio of a step, padding included
    steps : of the run
    evaluated : seconds of audio of all validations and the test
    task : the name of sbkit's task, or of the one that a user's task derives from; empty: an older line
    """

    operations: float
    micro_batches: int
    audio: float
    steps: int
    evaluated: float
    task: str = ""

    def same_as(self, other: Steps) -> bool:
        """Whether their steps compute the same; an older line may be of any task."""
        tasks = {self.task, other.task} - {""}
        return len(tasks) < 2 and self.micro_batches == other.micro_batches and all(
            math.isclose(mine, its, rel_tol=TOLERANCE)
            for mine, its in ((self.operations, other.operations), (self.audio, other.audio)))


@dataclass(frozen=True)
class FinishedRun:
    """A line of the file: a run that was not resumed.

    step_seconds : of a step, without waiting for a core
    hours : from the first step to the end of the test, without waiting for a core
    predicted : the prediction of a check, if there was one
    """

    setting: Setting
    steps: Steps
    step_seconds: float
    hours: float
    predicted: RunEstimate | None = None

    @property
    def trial(self) -> float:
        """Seconds of a step as a check measured them; 0: not measured."""
        return 0.0 if self.predicted is None else self.predicted.trial or 0.0

    @property
    def evaluation(self) -> float:
        """Time of an evaluation relative to training on the same audio."""
        rest = 3600 * self.hours - self.steps.steps * self.step_seconds
        return max(0.0, rest) / max(1e-9, self.steps.evaluated * self.step_seconds / self.steps.audio)


@dataclass(frozen=True)
class RunEstimate:
    """The predicted time of a run.

    step_seconds : of a step
    hours, low, high : of the whole run, with the interval
    by : fit, trial or limits: finished runs, a few steps, or the device's limits
    runs : the number of finished runs that were used
    trial : seconds of a step as a trial measured them
    """

    step_seconds: float
    hours: float
    low: float
    high: float
    by: str
    runs: int = 0
    trial: float | None = None


# ---------------------------------------------------------------- the file


def table_file() -> Path:
    """The file with the finished runs of this user on this machine; it names no recipes, folders or people."""
    return cache_folder() / "finished_runs.jsonl"


def read(setting: Setting | None = None) -> list[FinishedRun]:
    """Read the finished runs, those of one setting or all; lines that can't be read are left out."""
    runs = []
    for line in _lines("run"):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            predicted = line["predicted"] and RunEstimate(**line["predicted"])
            run = FinishedRun(Setting(**line["setting"]), Steps(**line["steps"]), float(line["step_seconds"]),
                              float(line["hours"]), predicted)
            numbers = (run.step_seconds, run.hours, *dataclasses.astuple(run.steps)[:-1])  # all but the task
            if all(0 < value < math.inf for value in numbers) and 3600 * run.hours >= MIN_SECONDS:
                runs.append(run)
    return [run for run in runs if setting in (None, run.setting)]


def _lines(kind: str) -> Iterator[dict[str, Any]]:  # JSON
    try:
        text = table_file().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found = json.loads(line)
            if found["format"] == FORMAT and found["kind"] == kind:
                yield found


def _append(kind: str, setting: Setting, steps: Steps, **values: object) -> None:
    line = {"format": FORMAT, "kind": kind, "time": round(time.time()), "setting": setting._asdict(),
            "steps": dataclasses.asdict(steps), **values}
    try:
        table_file().parent.mkdir(parents=True, exist_ok=True)
        with open(table_file(), "ab", buffering=0) as out:  # one write, so that runs side by side don't mix
            out.write((json.dumps(line) + "\n").encode())
    except OSError as error:
        logger.info("%s can't be written, so later predictions don't use this run: %s", table_file(), error)


def store_prediction(setting: Setting, steps: Steps, prediction: RunEstimate) -> None:
    """Store the prediction of a check, to compare it with the run."""
    _append("check", setting, steps, predicted=dataclasses.asdict(prediction))


# ---------------------------------------------------------------- recording


def cpu_model(environment: Mapping[str, Any]) -> str:
    """The name of the CPU without its number of cores, because only the threads of a run count."""
    return re.sub(r", \d+ cores?$", "", str(environment.get("cpu")))


def record(log: Iterable[Mapping[str, Any]], brain: type, threads: int, max_batch_seconds: float, dev_seconds: float,
           test_seconds: float) -> bool:
    """Add a finished run to the file unless it was resumed or short; return whether it was added.

    log : the lines of its metrics.jsonl
    brain : the class that trained
    threads : of a process
    max_batch_seconds : of a micro-batch
    dev_seconds, test_seconds : audio of a validation and of the test
    """
    log = list(log)
    starts = [line for line in log if line["kind"] == "run"]
    epochs = [line for line in log if line["kind"] == "epoch" and line.get("train_seconds")]
    tests = [line for line in log if line["kind"] == "test"]
    if len(starts) != 1 or len(tests) != 1 or not epochs or not epochs[-1].get("flops_per_s"):
        return False
    seconds = tests[0]["time"] - starts[0]["time"]
    if seconds < MIN_SECONDS:
        return False
    run, count = starts[0], epochs[-1]["step"]
    on_cpu = not str(run["device"]).startswith("cuda")
    cards = str(run["environment"].get("gpu", "")).split(" x ", 1)[-1]
    setting = Setting(cpu_model(run["environment"]) if on_cpu else cards, run["precision"], threads if on_cpu else 0,
                      run["devices"])
    padded = sum(line["audio_s_per_s"] * line["train_seconds"] / (1 - (line["padding_share"] or 0.0))
                 for line in epochs)
    operations = epochs[-1]["flops_per_s"] / epochs[-1]["audio_s_per_s"]
    steps = steps_of(brain, operations, padded / count / setting.processes, max_batch_seconds, count,
                     (len(epochs) * dev_seconds + test_seconds) / setting.processes)
    found = None  # what was last predicted for such a run
    for line in _lines("check"):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if line["setting"] == setting._asdict() and line["steps"]["steps"] == steps.steps and \
                    Steps(**line["steps"]).same_as(steps):
                found = line["predicted"]
    _append("run", setting, steps, step_seconds=sum(line["train_seconds"] for line in epochs) / count,
            hours=seconds / 3600, predicted=found)
    return True


def steps_of(brain: type, operations: float, audio: float, max_batch_seconds: float, steps: int,
             evaluated: float) -> Steps:
    """The work of steps on one device.

    brain : the class that trains
    operations : for a second of audio
    audio : seconds of a step on one device, padding included
    """
    task = next(each.__name__ for each in brain.__mro__ if each.__module__.startswith("sbkit."))  # no user's names
    return Steps(operations * audio, max(1, math.ceil(audio / max_batch_seconds)), audio, steps, evaluated, task)
