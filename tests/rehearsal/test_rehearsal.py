"""A whole run on cards that compute nothing: the flagship passes, and faults planted in each stage are named."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from sbkit.cli import main
from sbkit.rehearsal import run
from tools.gpu import process_group

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORDS = ("low", "high", "both")
#: Tasks with one fault each, on top of the word spotter of docs/tutorials/own-task.md.
FAULTS = '''
import os
import threading

import torch
import sbkit
from spotter import Spotter
from torch._subclasses.fake_tensor import is_fake

TRAIN = sbkit.Stage.TRAIN


class Ending(Spotter):
    """Waits at the end of an epoch, as often as it likes."""

    def on_stage_end(self, stage, loss, epoch=None):
        if stage == TRAIN:
            for _ in range(9):
                torch.zeros(1, device=self.device).item()


class Lazy(Spotter):
    """Waits and leaks in each step, and gives a graph that can't be traced."""

    kept = []

    def compute_objectives(self, scores, batch, stage):
        loss = super().compute_objectives(scores, batch, stage)
        if stage == TRAIN and not is_fake(scores):
            loss.total.item()  # waits
            thread = threading.Thread(target=loss.total.item)  # as one of autograd's
            thread.start()
            thread.join()
            self.kept.append(scores * 2)  # grows
        return loss

    def exported(self, run):
        found = super().exported(run)
        found.graph = Untraceable(found.graph)
        return found


class Plain(torch.optim.Optimizer):  # unfused
    """An optimizer of a user's own, which can't skip a step by itself."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


class Untraceable(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, signals, lengths):
        if signals.sum() < 1e9:  # depends on a value
            return self.inner(signals, lengths)


class Alone(Spotter):
    """Asks all ranks for something on one of them alone."""

    def compute_objectives(self, scores, batch, stage):
        if stage == TRAIN and torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
            torch.distributed.all_reduce(torch.ones(7, device=self.device))  # alone
        return super().compute_objectives(scores, batch, stage)


class Left(Spotter):
    """Leaves a tensor on the CPU where only a test of the second rank needs it."""

    def compute_objectives(self, scores, batch, stage):
        if stage == sbkit.Stage.TEST and torch.distributed.get_rank() == 1:
            scores = scores + torch.zeros(3)  # left
        return super().compute_objectives(scores, batch, stage)


class Kept:
    """What nothing that the Brain holds leads to."""


class Early(Spotter):
    """Mixes devices before the first step, and keeps what has no values of the count on a card."""

    def begin_run(self, texts, steps):
        torch.ones(3, device=self.device) + torch.ones(3)  # starts

    def compute_objectives(self, scores, batch, stage):
        weight = next(self.modules.parameters())
        if is_fake(scores) and weight.is_cuda and not is_fake(weight):
            Kept.scores = scores
        return super().compute_objectives(scores, batch, stage)


class Late(Spotter):
    """Mixes devices in a run that is resumed, and after a batch that didn't fit."""

    def on_fit_start(self):
        super().on_fit_start()
        if self.optimizer_step:
            torch.ones(3, device=self.device) + torch.ones(3)  # resumes

    def compute_objectives(self, scores, batch, stage):
        if stage == TRAIN and scores.is_cuda and torch.cuda.memory_stats().get("num_ooms"):
            scores = scores + torch.ones(3)  # parts
        return super().compute_objectives(scores, batch, stage)
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the word spotter, the tasks with faults, and recordings."""
    folder = tmp_path_factory.mktemp("mine")
    page = (ROOT / "docs" / "tutorials" / "own-task.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"```(?:python|yaml)\n# (spotter\S+)\n(.*?)```", page, re.S):
        (folder / name).write_text(text)
    (folder / "faults.py").write_text(FAULTS)
    drawn = np.random.default_rng(0)
    for split, count in (("train", 60), ("dev", 15), ("test", 15)):
        lines = ["ID,duration,wav,wrd"]
        for i in range(count):
            path = folder / "data" / f"{split}{i}.wav"
            path.parent.mkdir(exist_ok=True)
            soundfile.write(path, 0.1 * drawn.standard_normal(8_000), 16_000)
            lines.append(f"{split}{i},0.5,{path},{WORDS[i % 3]}")
        (folder / "data" / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def rehearse(home, server, monkeypatch, capsys):
    """The report of a rehearsal in this folder, as programs get it; what it starts is forked, its imports done."""
    here = f"import os, sys; os.chdir({str(home)!r}); sys.path[:0] = [''];"

    @contextlib.contextmanager
    def start(command, env, log, end_by):
        script = f"{here} from sbkit.rehearsal import run; run.main({command[-1]!r})"
        print(json.dumps([[script, env, log.name, log.name]]), file=server.stdin, flush=True)
        yield SimpleNamespace(wait=lambda seconds: server.stdout.readline())

    def rehearse(*words, code, cards="2xH100"):
        assert main(["check", *words, "--as", cards, "--json"]) == code
        said = capsys.readouterr().out
        assert "sbkit-rehearsal-" not in said  # its folder is gone
        return json.loads(said)

    monkeypatch.setattr(run, "child", start)
    monkeypatch.setattr(run, "PATIENCE", 30)  # not two minutes
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)
    return rehearse


def stages(report):
    return {name: stage["result"] for name, stage in report["sections"]["rehearsal"]["values"]["stages"].items()}


def places(report):
    """The kinds of errors, with the lines of faults.py that they name."""
    lines = ["", *FAULTS.splitlines()]
    return {(error["code"], lines[error["line"]].partition("#")[2].strip()) for error in report["errors"]
            if error["file"].endswith("faults.py")}


def test_waits_growth_and_an_operation_that_cannot_be_exported_are_named(rehearse):
    report = rehearse("spotter.yaml", "--brain", "!name:faults.Lazy", code=1, cards="H100")
    assert places(report) >= {("wait", "waits"), ("growth", "grows"), ("not-traceable", "depends on a value")}
    assert any(error["code"] == "wait" and not error["line"] and "backward" in error["message"]
               for error in report["errors"])
    assert stages(report)["steps"] == stages(report)["export"] == "failed"
    assert stages(report)["test"] == stages(report)["kill and resume"] == "ok"


def test_warns_of_an_optimizer_for_which_the_host_waits(rehearse):
    report = rehearse("spotter.yaml", "--opt_class", "!name:faults.Plain {lr: 0.001}", code=0, cards="H100")
    [warning] = [warning for warning in report["warnings"] if warning["code"] == "wait"]
    assert warning["key"] == "opt_class" and "Plain" in warning["message"]
    assert "# unfused" in FAULTS.splitlines()[warning["line"] - 1] and warning["file"].endswith("faults.py")
    assert "docs/how-to/extend.md" in warning["suggestion"]
    assert stages(report)["steps"] == "ok"


@pytest.mark.long
def test_a_collective_on_one_rank_alone_is_named(rehearse):
    report = rehearse("spotter.yaml", "--brain", "!name:faults.Alone", code=1)
    assert ("collectives", "alone") in places(report)


@pytest.mark.long
def test_a_tensor_left_on_the_cpu_by_one_rank_is_named_with_its_stage_and_nothing_else(rehearse):
    report = rehearse("spotter.yaml", "--brain", "!name:faults.Left", code=1)
    assert places(report) == {("device-mismatch", "left")} and len(report["errors"]) == 1
    assert stages(report)["test"] == "failed" and stages(report)["export"] == "not reached"


@pytest.mark.long
@pytest.mark.parametrize("task, lines, failed, said", [
    ("Early", {"starts"}, {"start", "count of FLOPs"}, "leaves some in Kept.scores"),
    ("Late", {"resumes", "parts"}, {"kill and resume", "a batch that doesn't fit"}, "")])
def test_faults_in_other_stages_are_named_with_them(rehearse, task, lines, failed, said):
    report = rehearse("spotter.yaml", "--brain", f"!name:faults.{task}", code=1, cards="H100")
    assert places(report) == {("device-mismatch", line) for line in lines}
    assert {name for name, result in stages(report).items() if result == "failed"} == failed
    assert any(said in error["message"] for error in report["errors"])


def test_a_task_that_knows_its_words_is_refused_without_a_corpus(rehearse):
    report = rehearse("spotter.yaml", "--data_folder", "nowhere", code=1, cards="H100")
    [error] = report["errors"]
    assert error["message"].startswith("there is no corpus nowhere on this machine, and Spotter has no tokens for the "
                                       "random words that replace it: '")
    assert error["file"].endswith("spotter.py") and "run the check with a corpus" in error["suggestion"]
    assert stages(report)["corpus"] == "failed" and stages(report)["check"] == "ok"


@pytest.mark.long
def test_a_sharded_run_succeeds_and_no_rank_ends_alone(rehearse):
    report = rehearse("spotter.yaml", "--fsdp", "true", "--brain", "!name:faults.Ending", code=0)
    found = stages(report)
    assert found.pop("a batch that doesn't fit") == "skipped: layers communicate between ranks, so none can end alone"
    assert set(found.values()) == {"ok"}


@pytest.mark.long
def test_a_signal_ends_what_a_rehearsal_has_started_too(home, tmp_path):
    process = subprocess.Popen([sys.executable, "-m", "sbkit", "check", "spotter.yaml", "--as", "H100"], cwd=home,
                               env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL)
    group = ""
    while not group:
        assert process.poll() is None
        time.sleep(0.1)
        group = "".join(path.read_text() for path in tmp_path.glob("sbkit-rehearsal-*/prepare.0.group"))
    process.terminate()
    assert process.wait(60) == 143
    until = time.monotonic() + 10
    while process_group.lives(int(group)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not process_group.lives(int(group)) and not list(tmp_path.glob("sbkit-rehearsal-*"))


@pytest.mark.long
def test_checkpoints_that_cannot_be_written_are_named(rehearse):
    report = rehearse("spotter.yaml", "--checkpointer.checkpoints_dir", "/dev/null/save", code=1, cards="H100")
    assert any("/dev/null" in error["message"] for error in report["errors"])
    assert "test" not in {name for name, result in stages(report).items() if result == "ok"}


def test_the_flagship_runs_from_start_to_end_on_two_ranks(rehearse, tmp_path):
    page = tmp_path / "page.html"
    words = str(ROOT / "hparams" / "ctc.yaml"), "--num_encoder_layers", "1", "--graphs", "false", "--html", str(page)
    report = rehearse(*words, code=0, cards="8xH100")
    assert set(stages(report).values()) == {"ok"} and not report["errors"]
    figures = report["sections"]["figures"]["values"]
    assert figures["estimated_bytes"] == pytest.approx(figures["peak_bytes"], rel=0.05)
    assert figures["launches"] > 100 and figures["collectives"] > 0
    assert max(report["sections"]["memory"]["values"]["bytes"]) == figures["peak_bytes"] > figures["held_bytes"]
    assert "<svg" in page.read_text(encoding="utf-8")
    assert "make gpu" in report["not_checked"][-1]
