"""The whole of ``sbkit doctor --gpu --rehearse``: no check can be broken before a card comes."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import sbkit
from sbkit.cli import main
from sbkit.doctor import probe
from sbkit.doctor.gpu import proof, report, runner
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
    out, told = tmp_path / "report", tmp_path / "told"
    words = ["--gpu", "--rehearse", "--only", "resume,pair", "--out", str(out)]
    # A folder with a short name, as the path of a socket below it has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="sb-") as home, open(told, "w") as stderr, \
            subprocess.Popen([sys.executable, "-m", "sbkit", "doctor", *words], stderr=stderr,
                             env={**os.environ, "TMPDIR": home}) as doctor:
        until = time.monotonic() + 120
        while not list((tmp_path / "report-logs").glob("*.log")) and time.monotonic() < until:
            time.sleep(0.1)
        doctor.terminate()
        assert doctor.wait(60) == 128 + signal.SIGTERM, told.read_text()
        assert not list(Path(home).glob("sbkit-gpu-*")) and not out.with_suffix(".md").exists()


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
    (["--rehearse"], "--rehearse works only with --gpu"), (["--gpu", "--json"], "--json works only without --gpu")])
def test_words_that_make_no_sense_are_refused(words, told, capsys):
    assert main(["doctor", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.fixture
def no_table(monkeypatch):
    """What stands in the machine's table is no matter here, and takes seconds to find."""
    monkeypatch.setattr(proof, "lines", lambda: [("torch", "2")])


class _Ends:
    """In the place of a check: it is as expected at once."""

    def __init__(self, check, *rest):
        self.check = check

    def result(self):
        return left_out(self.check, "seen", OK)


def test_the_page_is_written_as_each_check_ends(tmp_path, monkeypatch, no_table):
    pages, write = [], report.write
    monkeypatch.setattr(runner, "CheckProcess", _Ends)
    monkeypatch.setattr(report, "write", lambda made, out: pages.append(made.results) or write(made, out))
    out = tmp_path / "report"
    assert proof.prove(proof.GpuRequest(rehearse=True, out=out, only=["kernels", "tests"])) == 0
    verdicts = [sorted(each.verdict for each in page) for page in pages]
    assert verdicts == [sorted([OK, NOT_RUN]), [OK, OK], [OK, OK]]
    assert json.loads(out.with_suffix(".json").read_text())["ok"]


class _Raises:
    """What Python calls where it can raise nothing."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_is_acted_on_wherever_it_comes_and_what_was_started_is_ended(tmp_path, monkeypatch, no_table):
    ended = []

    class Runs(_Ends):
        def result(self):
            _Raises()

        def end(self):
            signal.raise_signal(signal.SIGTERM)  # once more, while it is at it
            ended.append(self.check.name)

    monkeypatch.setattr(runner, "CheckProcess", Runs)
    monkeypatch.setattr(proof, "usable_cores", lambda: 2)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        proof.prove(proof.GpuRequest(rehearse=True, out=tmp_path / "report", only=["kernels", "tests", "pair"]))
    assert left.value.code == 128 + signal.SIGTERM and ended == ["kernels", "pair"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("signum, raised", [(signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit),
                                            (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_that_comes_last_is_not_lost(signum, raised):
    with pytest.raises(raised) as left, proof._Stop():
        signal.raise_signal(signum)
    assert getattr(left.value, "code", 128 + signal.SIGINT) == 128 + signum


def test_under_nohup_the_checks_outlive_the_terminal(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with proof._Stop():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_folder_that_cannot_be_removed_is_told_of_and_no_more(tmp_path, monkeypatch, capsys, no_table):
    monkeypatch.setattr(runner, "CheckProcess", _Ends)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "rmdir", _refuses)
    request = proof.GpuRequest(rehearse=True, out=tmp_path / "report", only=["kernels", "tests"])
    assert proof.prove(request) == 0
    (left,) = tmp_path.glob("sbkit-gpu-*")
    assert f"{left} could not be removed" in capsys.readouterr().err


def _refuses(*args, **kwargs):
    raise OSError(errno.EBUSY, "in use")
