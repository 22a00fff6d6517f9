"""The whole of ``python -m tools.gpu --dry-run``: no check can be broken before a card comes."""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest

from sbkit import doctor
from sbkit.recipe import arguments
from tools.bench import train
from tools.gpu import __main__ as gpu
from tools.gpu import speed
from tools.gpu.bench import RECIPES, Bench
from tools.gpu.check import CHECKS, NOT_RUN, OK, left_out

COMMAND = [sys.executable, "-m", "tools.gpu", "--dry-run"]


def module(words):
    """Be ``python -m WORDS`` in a process that was forked to start it: its imports are done."""
    os.closerange(3, 1000)  # of which one tells who forked it that it has started
    sys.argv, sys.stdin, sys.stdout = words, os.fdopen(0), os.fdopen(1, "w")
    runpy.run_module(words[0], run_name="__main__")
    os._exit(0)


def dry_run(*words):
    def start(command, **pipes):
        assert command[:2] == [sys.executable, "-m"]
        return subprocess.Popen(command, preexec_fn=partial(module, command[2:]), **pipes)

    doctor.examine = list  # takes seconds
    train.subprocess = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)
    sys.exit(gpu.main(words))


@pytest.mark.long
@pytest.mark.timeout(1600)  # two minutes on a core that is free
def test_every_check_runs_on_a_cpu_but_the_slow_twin_of_large(tmp_path):
    out, asked = tmp_path / "report", [check.name for check in CHECKS if check.name != "flagship"]
    done = processes.program(dry_run, "--dry-run", "--minutes", "25", "--only", ",".join(asked), "--out", str(out),
                             timeout=1500)
    page = out.with_suffix(".md").read_text()
    assert done.returncode == 0, f"{done.stderr}\n{page}"
    told = json.loads(out.with_suffix(".json").read_text())
    assert [check["name"] for check in told["checks"]] == asked
    verdicts = {line["verdict"] for check in told["checks"] for line in check["lines"]}
    assert verdicts == {"as expected", "dry run"} and told["ok"], page
    ended = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(ended) == len(asked) and told["verdict"] in done.stderr


@pytest.mark.long
def test_the_comparison_of_the_flagship_reports_each_of_its_lines(tmp_path):
    class Canned(Bench):
        def call(self, function, words):
            assert arguments.parse(words[words.index("--recipe") + 1:]).path == RECIPES["flagship"]
            sides = {"sbkit fp32": [3.0], "stock fp32": [1.0]}
            Path(words[words.index("--json") + 1]).write_text(json.dumps(
                {"audio_s_per_s": dict.fromkeys(speed.TARGETS, sides), "peak_mib": {}}))

    speed.flagship(Canned("flagship", "cpu", False, 1, None, tmp_path, tmp_path))
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    expected = next(check.expects for check in CHECKS if check.name == "flagship")
    assert [(line["key"], line["verdict"]) for line in seen] == [(each.key, OK) for each in expected]


@pytest.mark.long
def test_a_signal_ends_the_check_that_runs_too(tmp_path):
    out, told = tmp_path / "report", tmp_path / "told"
    # A folder with a short name, as the path of a socket below it has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="sb-") as home, open(told, "w") as stderr, \
            subprocess.Popen([*COMMAND, "--only", "resume,pair", "--out", str(out)], cwd=gpu.CHECKOUT, stderr=stderr,
                             env={**os.environ, "TMPDIR": home}) as running:
        until = time.monotonic() + 120
        while not list((tmp_path / "report-logs").glob("*.log")) and time.monotonic() < until:
            time.sleep(0.1)
        running.terminate()
        assert running.wait(60) == 128 + signal.SIGTERM, told.read_text()
        assert not list(Path(home).glob("sbkit-gpu-*")) and not out.with_suffix(".md").exists()


def test_without_a_card_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "ask", lambda library: {"cards": {}})
    assert gpu.main([]) == 1
    assert "torch finds no CUDA card" in capsys.readouterr().err


def test_a_check_that_does_not_exist_is_named(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--dry-run", "--only", "kernel"])
    assert "there is no check kernel; choose from step,kernels," in capsys.readouterr().err


@pytest.fixture
def limits(monkeypatch, tmp_path):
    """Runs checks that take the given seconds of a clock that stands; returns each one's limit, and the report."""
    monkeypatch.setattr(doctor, "examine", lambda: [])  # takes seconds
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    now, given = [1000.0], {}
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])

    def run(minutes, *, only, **seconds):
        class Ends:
            def __init__(self, check, settings, logs, limit):
                self.check = check
                given[check.name] = limit

            def result(self):
                now[0] += seconds.get(self.check.name, 0)
                return left_out(self.check, "seen", OK)

            def end(self):
                pass

        monkeypatch.setattr(gpu, "CheckProcess", Ends)
        out = tmp_path / "report"
        code = gpu.main(["--dry-run", "--minutes", str(minutes), "--only", only, "--out", str(out)])
        checks = json.loads(out.with_suffix(".json").read_text())["checks"]
        return code, given, {check["name"]: check for check in checks}

    return run


def share(name):
    return next(check.seconds for check in CHECKS if check.name == name)


def test_a_check_may_use_what_earlier_ones_left_over_and_no_share_of_later_ones(limits):
    seconds = share("kernels") + share("memory") + share("tests") + gpu.APART
    code, given, _ = limits(seconds / 60, only="kernels,memory,tests", kernels=5, memory=share("memory"))
    assert code == 0
    assert given["kernels"] == pytest.approx(share("kernels"))
    assert given["memory"] == pytest.approx(share("kernels") - 5 + share("memory"))
    assert given["tests"] == pytest.approx(share("kernels") - 5 + share("tests"))


def test_a_check_without_room_says_so_and_the_next_one_that_fits_runs(limits):
    time_left = share("training") + share("memory") - 10
    code, given, told = limits((time_left + gpu.APART) / 60, only="training,flagship,memory", training=40)
    assert code == 1 and set(given) == {"training", "memory"}
    assert told["flagship"]["verdict"] == NOT_RUN and told["memory"]["verdict"] == OK
    assert f"of the {share('flagship'):g} s it needs" in told["flagship"]["lines"][0]["seen"]
