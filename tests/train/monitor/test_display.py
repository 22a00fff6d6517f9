"""The bar: what it says, that it fits the terminal, and that no training step waits for it."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import termios

import pytest
import torch
from host_syncs import CountsHostSyncs

from sbkit.data.batch import PlannedBatch
from sbkit.train.monitor import display as display_module
from sbkit.train.monitor.display import StageDisplay
from sbkit.train.monitor.timing import StepTimes

ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Time:
    """A clock that moves when told to."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(display_module.time, "monotonic", lambda: self.now)

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Time(monkeypatch)


class Times(StepTimes):
    waited = 0.01

    def data_share(self):
        return self.waited


class FourHundredSeconds(PlannedBatch):
    seconds = 400.0
    padded_seconds = 420.0


BATCH = FourHundredSeconds()


def train(display, clock, steps, loss=1.234, rate=3e-4):
    for _ in range(steps):
        clock.pass_(0.5)
        display.count(BATCH)
        if clock.now >= display.draw_at:
            display.set_values(loss, rate)
            display.draw()


class Terminal:
    """A real one, of a given width; ``screens()`` are the states that its line went through."""

    def __init__(self, columns: int):
        self._read, self._write = os.openpty()
        fcntl.ioctl(self._write, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.out = os.fdopen(self._write, "w")
        os.set_blocking(self._read, False)
        self.raw = ""

    def text(self) -> str:
        self.out.flush()
        while True:
            try:
                self.raw += os.read(self._read, 65536).decode()
            except BlockingIOError:
                return self.raw

    def screens(self) -> list[str]:
        plain = ESCAPES.sub("", self.text())
        return [part.rstrip() for part in re.split(r"[\r\n]+", plain) if part.strip()]


def test_the_words_of_a_line(clock, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(display_module.ranks, "world_size", lambda: 2)
    with StageDisplay("train 12", 2800, initial=1200, times=Times(), out=out) as shown:
        train(shown, clock, 59)
        assert out.getvalue() == "", "a cluster's log gets a line each 30 seconds, not more"
        train(shown, clock, 1)
        assert out.getvalue() == (
            "train 12: 1260/2800 (45 %), 12:50 left, loss 1.234, audio 1600 s/s, data wait 1 %, lr 3.0e-04, "
            "padding 5 %\n")
        train(shown, clock, 4)
    assert out.getvalue().splitlines()[1:] == [
        "train 12: 1264/2800 (45 %), took 0:32, loss 1.234, audio 1600 s/s, data wait 1 %, lr 3.0e-04, "
        "padding 5 %"]
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


@pytest.mark.parametrize(("columns", "words"), [
    (140, ["1210/2800", "left", "loss 1.234", "lr 3.0e-04", "audio 800 s/s", "data wait 1 %", "padding 5 %"]),
    (80, ["1210/2800", "left", "loss 1.234", "audio 800 s/s"]),
    (60, ["1210/2800", "left", "loss 1.234"]),
    (48, ["1210/2800", "left"]),
    (12, []),
])
def test_it_fits_the_terminal_and_drops_the_least_important_first(clock, columns, words):
    terminal = Terminal(columns)
    shown = StageDisplay("train 12", 2800, initial=1200, times=Times(), out=terminal.out, colour="green")
    train(shown, clock, 10)
    screens = terminal.screens()
    assert all(len(screen) <= columns for screen in screens)
    assert screens[-1].startswith("train 12  43%|"[:columns - 1])
    for word in words:
        assert word in screens[-1], screens[-1]


def test_the_last_state_stays(clock):
    terminal = Terminal(100)
    with StageDisplay("valid 3", 4, out=terminal.out) as shown:
        train(shown, clock, 4)
    assert terminal.screens()[-1].startswith("valid 3 100%|") and "took 0:02" in terminal.screens()[-1]
    assert terminal.text().endswith("\n")


def test_colour_only_where_it_says_something(clock, monkeypatch):
    def raw(**values):
        terminal, times = Terminal(140), Times()
        times.waited = values.pop("waits", 0.01)
        shown = StageDisplay("train", 10, out=terminal.out, times=times)
        train(shown, clock, 10, **values)
        return terminal.text()

    assert "\x1b[3" not in raw()
    assert "\x1b[31mloss nan\x1b[0m" in raw(loss=float("nan"))
    assert "\x1b[33mdata wait 40 %\x1b[0m" in raw(waits=0.4)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in raw(loss=float("nan"))


def test_unknown_length_and_braces_in_a_name(clock):
    terminal = Terminal(80)
    shown = StageDisplay("test {x}", None, out=terminal.out)
    train(shown, clock, 3)
    assert terminal.screens()[-1].startswith("test {x}: 3, loss 1.234")


def test_speeds_are_those_of_the_last_minute(clock):
    out = io.StringIO()
    shown = StageDisplay("train", 1000, out=out)
    clock.pass_(600)  # the first step compiles
    shown.count(BATCH)
    shown.draw()
    train(shown, clock, 300)
    assert "audio 800 s/s" in out.getvalue().splitlines()[-1]


def test_hidden_shows_nothing(capsys, clock):
    with StageDisplay("train", 10, show=False) as shown:
        train(shown, clock, 100)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_rate_on_a_device_is_not_read(clock):
    out = io.StringIO()
    shown = StageDisplay("train", 10, out=out)
    with CountsHostSyncs() as syncs:
        train(shown, clock, 60, rate=torch.tensor(0.5))
    assert syncs.count == 0 and "loss 1.234, " in out.getvalue() and "lr" not in out.getvalue()


@pytest.mark.parametrize(("value", "text"), [(1.23456, "1.235"), (0.0, "0.000"), (1234.5, "1.23e+03"),
                                             (1e-5, "1.00e-05"), (float("inf"), "inf"), (-3.5, "-3.500")])
def test_numbers_keep_their_meaning(clock, value, text):
    out = io.StringIO()
    train(StageDisplay("train", 100, out=out), clock, 60, loss=value)
    assert f", loss {text}, " in out.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599.7, "1:00:00"),
                                               (90061, "25:01:01")])
def test_times(clock, seconds, text):
    out = io.StringIO()
    with StageDisplay("train", 100, out=out):
        clock.pass_(seconds)
    assert f", took {text}\n" in out.getvalue()
