"""The whole of ``sbkit doctor --gpu --rehearse``: no check can be broken before a card comes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import sbkit
from sbkit.cli import main
from sbkit.doctor import probe
from sbkit.doctor.gpu import command, report, runner
from sbkit.doctor.gpu.catalogue import CHECKS
from sbkit.doctor.gpu.check import NOT_RUN, OK, left_out


@pytest.mark.slow
@pytest.mark.timeout(1600)  # a minute and a half on two cores that are free
def test_every_check_runs_on_a_cpu(tmp_path):
    out = tmp_path / "report"
    words = ["--gpu", "--rehearse", "--minutes", "25", "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "sbkit", "doctor", *words], capture_output=True, text=True)
    page = out.with_suffix(".md").read_text()
    assert done.returncode == 0, f"{done.stderr}\n{page}"
    told = json.loads(out.with_suffix(".json").read_text())
    assert [check["name"] for check in told["checks"]] == [check.name for check in CHECKS]
    verdicts = {line["verdict"] for check in told["checks"] for line in check["lines"]}
    assert verdicts == {"as expected", "rehearsed"} and told["ok"], page
    ended = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(ended) == len(CHECKS) and told["verdict"] in done.stderr


@pytest.mark.slow
def test_a_signal_ends_the_checks_that_run_too(tmp_path):
    out, home = tmp_path / "report", tmp_path / "tmp"
    home.mkdir()
    words = ["--gpu", "--rehearse", "--only", "resume,pair", "--out", str(out)]
    with subprocess.Popen([sys.executable, "-m", "sbkit", "doctor", *words], stderr=subprocess.DEVNULL,
                          env={**os.environ, "TMPDIR": str(home)}) as doctor:
        until = time.monotonic() + 120
        while not list((tmp_path / "report-logs").glob("*.log")) and time.monotonic() < until:
            time.sleep(0.1)
        doctor.terminate()
        assert doctor.wait(60) == 128 + signal.SIGTERM
    assert not list(home.glob("sbkit-gpu-*")) and not out.with_suffix(".md").exists()


def test_without_a_card_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(probe, "asked", lambda library: {"cards": {"cards": []}})
    assert main(["doctor", "--gpu"]) == 1
    assert "torch finds no CUDA card" in capsys.readouterr().err


def test_without_a_checkout_it_says_what_it_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sbkit, "__file__", str(tmp_path / "sbkit" / "__init__.py"))
    assert main(["doctor", "--gpu", "--rehearse"]) == 2
    assert "needs a checkout of sbkit" in capsys.readouterr().err


@pytest.mark.parametrize("words, told", [
    (["--gpu", "--rehearse", "--only", "kernel"], "there is no check kernel"),
    (["--rehearse"], "--rehearse goes with --gpu"), (["--gpu", "--json"], "--json goes without --gpu")])
def test_words_that_make_no_sense_are_refused(words, told, capsys):
    assert main(["doctor", *words]) == 2
    assert told in capsys.readouterr().err


def test_the_page_is_written_as_each_check_ends(tmp_path, monkeypatch):
    pages, write = [], report.write
    monkeypatch.setattr(runner, "run", lambda check, *rest: left_out(check, "seen", OK))
    monkeypatch.setattr(report, "write", lambda made, out: pages.append(made.results) or write(made, out))
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # this process keeps its own
    out = tmp_path / "report"
    assert command.prove(command.Request(rehearse=True, out=out, only=["kernels", "tests"])) == 0
    verdicts = [sorted(each.verdict for each in page) for page in pages]
    assert verdicts == [sorted([OK, NOT_RUN]), [OK, OK], [OK, OK]]
    assert json.loads(out.with_suffix(".json").read_text())["ok"]
