"""Runs a check in a separate process with a time limit, so that a crash or a hang doesn't affect the others."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from sbkit.doctor.gpu.bench import Bench
from sbkit.doctor.gpu.check import Check, Exit, Observation, Result, complete
from sbkit.errors import summary
from sbkit.system import helper_process, processes

_CONTEXT = multiprocessing.get_context("forkserver")
_POLL = 0.05
#: Seconds that a check's child processes may take to end once killed.
_GOING_SECONDS = 30.0


class CheckProcess:
    """A running check with a time limit; what it has reported by then counts."""

    def __init__(self, check: Check, settings: dict[str, Any], logs: Path, limit: float):
        self.check, self._limit, self._cards = check, limit, settings["cards"]
        self._log, self._folder = logs / f"{check.name}.log", settings["home"] / check.name
        self._folder.mkdir(parents=True)
        bench = Bench(check.name, folder=self._folder, **settings)
        # Checks are forked from a server that has imported everything but never touched a card.
        _CONTEXT.set_forkserver_preload([f"{__package__}.preload"])
        self._process = _CONTEXT.Process(target=_check, args=(check.function, bench, str(self._log)))
        self._started = time.monotonic()
        with helper_process.away_from_here():
            self._process.start()

    @property
    def _group(self) -> int:
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def result(self) -> Result | None:
        """Return the result; None while it runs."""
        seconds = time.monotonic() - self._started
        late = self._process.exitcode is None
        if late and seconds < self._limit:
            return None
        self.end()
        found, notes = _read(self._folder / "seen.jsonl")
        how = f"cut off after {seconds:.0f} s, its limit" if late else _how(self._process.exitcode, self._log)
        return complete(self.check, found, notes, Exit(seconds, how, late), self._cards, str(self._log))

    def end(self) -> None:
        """Kill the check and its children, and wait until they are gone: one may still be writing a file."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._group, signal.SIGKILL)
        if self._process.exitcode is None:
            self._process.kill()
        self._process.join()
        until = time.monotonic() + _GOING_SECONDS
        while processes.group_lives(self._group) and time.monotonic() < until:
            time.sleep(_POLL)


def _how(code: int | None, log: Path) -> str:
    if not code:
        return ""
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"its process ended with code {code}"


def _read(told: Path) -> tuple[list[Observation], list[str]]:
    found, notes = [], []
    if told.exists():
        for line in told.read_text(encoding="utf-8").splitlines():
            facts = json.loads(line)
            if "note" in facts:
                notes.append(facts["note"])
            else:
                found.append(Observation(**facts))
    return found, notes


def _check(function: str, bench: Bench, log: str) -> None:
    """Run the check in its process."""
    os.setpgid(0, 0)  # its children are ended with it
    os.environ.pop("PYTHONSAFEPATH", None)  # set for the server; a tool imports modules next to it
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    multiprocessing.set_start_method("fork", force=True)  # for its own children, as in an ordinary program
    code = 0
    try:
        if bench.rehearse:
            import torch

            from sbkit.recipe import speed

            torch.set_num_threads(1)
            torch._dynamo.config.disable = True
            speed.LOOK_SECONDS = 0.0  # its runs look for the CPU's speed for longer than they train
        module, name = function.split(":")
        getattr(importlib.import_module(module, __package__), name)(bench)
    except BaseException as error:
        traceback.print_exc()
        print(summary(error), file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
