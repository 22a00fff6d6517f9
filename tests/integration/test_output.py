"""What becomes of its output never ends a run: log.txt has the lines that nobody could read."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import sys
import termios
import threading
from pathlib import Path

import pytest
from processes import ROOT, command, programs, sbkit
from run_folders import TINY, corpus
from trained_runs import options

pytestmark = pytest.mark.slow


def lost_reader(*folder):
    """A pipe that nobody reads: ``sbkit train ... | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    return [writing, writing]


def closed(*folder):
    """No streams at all: ``>&- 2>&-``."""
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None
    return [None, None]


def terminal(folder):
    """A terminal of this process's own, that is closed after the first epoch."""
    os.setsid()
    control, screen = os.openpty()
    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)

    def read_then_close():  # in one thread: another file may have the number of the closed one at once
        while not (folder / "train_log.txt").exists():
            if select.select([control], [], [], 0.01)[0]:
                os.read(control, 1000)
        os.close(control)

    threading.Thread(target=read_then_close, daemon=True).start()
    return [screen, screen]


def terminal_under_nohup(folder):
    """The same where its end is ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return terminal(folder)


def with_output(kind, folder, *words):
    for fd, target in zip((1, 2), globals()[kind](Path(folder)), strict=True):
        os.close(fd) if target is None else os.dup2(target, fd)
    command(str(ROOT), *words)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    data = corpus(tmp_path_factory.mktemp("data"), train=16, dev=4, test=4)
    keys = {**TINY, "data_folder": data, "number_of_epochs": 3, "max_batch_seconds": 5, "step_seconds": 5}
    return ["train", "hparams/ctc.yaml", "--device", "cpu", "--no-check", *options(**keys)]


def steps(folder):
    """What the losses of the run were, to the last digit that is written."""
    return re.findall(r"train loss: \S+ - valid loss: \S+", (folder / "train_log.txt").read_text())


@pytest.fixture(scope="module")
def undisturbed(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    sbkit(*words, f"--output_folder={folder}")
    assert len(steps(folder)) == 3
    return folder


@pytest.mark.parametrize("kind, world", [
    ("lost_reader", 2), ("closed", 1), ("terminal_under_nohup", 1)])
def test_a_run_goes_on_whatever_becomes_of_its_output(kind, world, words, undisturbed, tmp_path):
    done = programs(world, with_output, kind, str(tmp_path), *words, f"--output_folder={tmp_path}", timeout=400)
    assert [each.returncode for each in done] == [0] * world
    if world == 1:
        assert steps(tmp_path) == steps(undisturbed)
    log = (tmp_path / "log.txt").read_text()
    assert len(steps(tmp_path)) == 3 and "INFO - test WER " in log and "INFO - report: " in log
    assert log.count("Epoch loaded") == 1  # what a logger said is there once
    told = log.count("INFO - SpeechBrain CSV")  # the summary of the corpus, printed before the terminal was closed
    assert told == (kind != "terminal_under_nohup")


def test_the_end_of_the_terminal_saves_and_stops_and_the_next_start_goes_on(words, undisturbed, tmp_path):
    words = [*words, f"--output_folder={tmp_path}"]
    (done,) = programs(1, with_output, "terminal", str(tmp_path), *words, timeout=400)
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 129, log
    assert len(re.findall(r"INFO - stopped by SIGHUP after step \d+, checkpoint saved at", log)) == 1, log
    done = sbkit(*words)
    assert steps(tmp_path) == steps(undisturbed), log + done.stderr
