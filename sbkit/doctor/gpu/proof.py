"""Runs all checks of the cards in order of value, prints a line as each ends, and writes the report."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import sbkit
from sbkit.doctor.gpu import report, runner
from sbkit.doctor.gpu.budget import Budget, chosen
from sbkit.doctor.gpu.catalogue import CHECKS
from sbkit.doctor.gpu.check import BAD, NOT_RUN, NOT_SHOWN, Check, Result, headline, left_out, passed
from sbkit.doctor.gpu.machine import Machine, lines
from sbkit.errors import SbkitError
from sbkit.system.cores import usable_cores

MINUTES = 10.0
#: Seconds between two polls of the running checks.
_POLL = 0.05


@dataclass(frozen=True)
class GpuRequest:
    """Options of ``sbkit doctor --gpu``.

    rehearse : run on the CPU with small sizes, to show that the checks themselves work
    out : path of the report, without its suffix
    only : names of checks; none: all
    minutes : time limit for everything
    """

    rehearse: bool = False
    out: Path = Path("gpu-report")
    only: Sequence[str] = ()
    minutes: float = MINUTES


def prove(request: GpuRequest) -> int:
    """Run the checks and write the report; returns 1 if one falls short or wasn't run."""
    asked, checkout = _asked(request.only), _checkout()
    machine = Machine.look(request.rehearse)
    started, stamp = time.monotonic(), time.time()
    logs = Path(f"{request.out}-logs").absolute()
    logs.mkdir(parents=True, exist_ok=True)
    _say(f"{len(asked)} checks on {machine.name}, {request.minutes:g} minutes at most; logs in {logs}")
    about = lines()

    def write(results: Sequence[Result]) -> tuple[Path, Path]:
        made = report.Made(stamp, time.monotonic() - started, request.rehearse, request.minutes, about, results,
                           request.only)
        return report.write(made, request.out)

    with _Stop() as stop, _folder() as home:
        results = _run(asked, request, machine, checkout, home, logs, write, stop)
        _say(f"\n{headline(results)}\n{' '.join(map(str, write(results)))}")
    return 0 if passed(results) else 1


class _Stop:
    """Signals that end the command, handled between two polls of the checks: an exception raised in the handler could
    be lost in a destructor, or interrupt the cleanup."""

    def __init__(self) -> None:
        self._signum: int | None = None

    def __enter__(self) -> _Stop:
        wanted = [signum for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
                  if signal.getsignal(signum) not in (signal.SIG_IGN, None)]  # under nohup, SIGHUP stays ignored
        self._before = {signum: signal.signal(signum, self._note) for signum in wanted}
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if kind is None:
            self.if_asked()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._signum = self._signum or signum

    def if_asked(self) -> None:
        """End the command if a signal was received."""
        if self._signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signum is not None:
            raise SystemExit(128 + self._signum)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Create a temporary folder; failing to remove it is not an error."""
    home = Path(tempfile.mkdtemp(prefix="sbkit-gpu-"))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)
        if home.exists():
            _say(f"{home} could not be removed; it is no longer needed")


def _asked(only: Sequence[str]) -> list[Check]:
    known = [check.name for check in CHECKS]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise SbkitError(f"there is no check {', '.join(unknown)}", hint=f"choose from {','.join(known)}")
    return [check for check in CHECKS if not only or check.name in only]


def _run(asked: list[Check], request: GpuRequest, machine: Machine, checkout: Path, home: Path, logs: Path,
         write: Callable[[Sequence[Result]], object], stop: _Stop) -> list[Result]:
    """Run the checks; results are written as each ends."""
    results = {check.name: left_out(check, f"needs {check.cards} cards", NOT_SHOWN)
               for check in asked if check.cards > machine.cards}
    possible = [check for check in asked if check.name not in results]
    timely = chosen(possible, 60 * request.minutes)
    results |= {check.name: left_out(check, f"no time was left within {request.minutes:g} minutes", NOT_RUN)
                for check in possible if check not in timely}
    settings = {"device": machine.device, "rehearse": request.rehearse, "cards": machine.cards, "gib": machine.gib,
                "checkout": checkout, "home": home}
    os.environ["PYTHONPATH"] = _path(checkout)
    budget, ended = Budget(timely, 60 * request.minutes), len(results)
    for result in results.values():
        _tell(result, 0, len(asked))
    results |= {check.name: left_out(check, "not ended yet", NOT_RUN) for check in timely}
    starts = (runner.CheckProcess(check, settings, logs, budget.limit(check)) for check in timely)
    at_once = min(2, usable_cores()) if request.rehearse else 1  # nothing is timed in a rehearsal
    with contextlib.closing(_results(starts, at_once, stop)) as found:
        for result in found:
            results[result.check.name] = result
            ended += 1
            _tell(result, ended, len(asked))
            write([results[check.name] for check in asked])
    return [results[check.name] for check in asked]


def _results(starts: Iterator[runner.CheckProcess], at_once: int, stop: _Stop) -> Generator[Result, None, None]:
    """Yield the result of each check as it ends; checks still running on exit are killed."""
    running: list[runner.CheckProcess] = []
    try:
        while True:
            stop.if_asked()
            running += itertools.islice(starts, at_once - len(running))
            if not running:
                return
            for each in list(running):
                if (result := each.result()) is not None:
                    running.remove(each)
                    yield result
            time.sleep(_POLL)
    finally:
        for each in running:
            each.end()


def _checkout() -> Path:
    """Find the checkout that contains this package, with the recipes, tools and tests that the checks run."""
    folder = Path(sbkit.__file__).resolve().parents[1]
    if not all((folder / name).is_dir() for name in ("hparams", "recipes", "tools", "tests")):
        raise SbkitError(f"this needs a checkout of sbkit, with its recipes, tools and tests, but {folder} isn't one",
                         hint="run it from a checkout: make gpu")
    return folder


def _path(checkout: Path) -> str:
    """The PYTHONPATH of all started processes, which includes this process's own entries."""
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([str(checkout), *(os.path.abspath(each) for each in others if each)]))


def _tell(result: Result, place: int, count: int) -> None:
    """Print a line as a check ends."""
    number = f"[{place:2}/{count}]" if place else " " * len(f"[{count:2}/{count}]")
    bad = [f"{expect.what}: {seen.seen}" for expect, seen in result.lines()
           if seen.verdict == result.verdict and result.verdict in BAD]
    more = f"  {bad[0]}" if bad else ""
    _say(f"{number} {result.check.name:<10} {result.seconds:6.1f} s  {result.verdict}{more}")


def _say(text: object) -> None:
    print(text, file=sys.stderr, flush=True)
