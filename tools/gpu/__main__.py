"""Runs the checks of the cards in order, prints a line as each ends, and writes ``gpu-report.md`` and ``.json``.

    python -m tools.gpu [--dry-run] [--only CHECK[,CHECK]] [--minutes 20] [--out gpu-report]

Each check has a share of the time, and may also use what earlier ones left over.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sbkit import doctor
from sbkit.errors import SbkitError
from sbkit.rehearsal import fake_gpu

from . import report
from .bench import CheckProcess
from .check import BAD, CHECKS, NOT_RUN, NOT_SHOWN, Check, Result, headline, left_out, passed

CHECKOUT = Path(__file__).resolve().parents[2]
#: Seconds reserved for the table of the machine, the imports and the report.
APART = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and write the report; returns 1 if one falls short or wasn't run."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="the same checks, scaled down, on the CPU")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="CHECK[,CHECK]")
    parser.add_argument("--minutes", type=float, default=20.0, help="time limit for everything (20)")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="the report's name without .md and .json")
    args = parser.parse_args(argv)
    known = [check.name for check in CHECKS]
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"there is no check {', '.join(unknown)}; choose from {','.join(known)}")
    try:
        return prove(args)
    except SbkitError as error:
        say(f"error: {error}")
        return error.exit_code


def prove(args: argparse.Namespace) -> int:
    """Run the asked checks; the report is written as each ends."""
    started, stamp = time.monotonic(), time.time()
    asked = [check for check in CHECKS if not args.only or check.name in args.only]
    settings, machine = find_cards(args.dry_run)
    on_fake_gpu = fake_gpu.active() and not args.only  # where what it can't show is left out
    logs = Path(f"{args.out}-logs").absolute()
    logs.mkdir(parents=True, exist_ok=True)
    say(f"{len(asked)} checks on {machine}, {args.minutes:g} minutes at most; logs in {logs}")
    about = [(each.what, each.found) for each in doctor.examine()]
    paths = [str(CHECKOUT), *(os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(":") if each)]
    os.environ["PYTHONPATH"] = ":".join(dict.fromkeys(paths))  # of all that is started
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
            signal.signal(signum, _stop)
    results = {check.name: left_out(check, "not ended yet", NOT_RUN) for check in asked}
    home = Path(tempfile.mkdtemp(prefix="sbkit-gpu-"))
    try:
        until = started + 60 * args.minutes - APART
        for place, check in enumerate(asked):
            result = _run(check, asked[place + 1:], until, {**settings, "home": home}, logs, on_fake_gpu)
            results[check.name] = result
            written = report.write(report.RunReport(stamp, time.monotonic() - started, args.dry_run, about,
                                               list(results.values()), args.only), args.out)
            bad = [f"{expect.what}: {seen.seen}" for expect, seen in result.lines() if seen.verdict in BAD]
            say(f"[{place + 1:2}/{len(asked)}] {check.name:<10} {result.seconds:6.1f} s of {check.seconds:3g}  "
                f"{result.verdict}{'  ' + bad[0] if bad else ''}")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    found = list(results.values())
    say(f"\n{headline(found)}\n{' '.join(map(str, written))}, {time.monotonic() - started:.0f} s")
    return 0 if passed(found) else 1


def _run(check: Check, later: Sequence[Check], until: float, settings: dict[str, object], logs: Path,
         on_fake_gpu: bool) -> Result:
    """Run a check for as long as it may take; one that has no room is left out, and those after it aren't."""
    cards = settings["cards"]
    assert isinstance(cards, int)
    if why := check.not_here(cards, on_fake_gpu):
        return left_out(check, why, NOT_SHOWN)
    left = until - time.monotonic()
    if check.seconds > left:
        return left_out(check, f"no time was left: {max(0.0, left):.0f} s of the {check.seconds:g} s it needs", NOT_RUN)
    shares = sum(each.seconds for each in later if not each.not_here(cards, on_fake_gpu))
    running = CheckProcess(check, settings, logs, max(check.seconds, left - shares))
    try:
        return running.result()
    finally:
        running.end()


def _stop(signum: int, frame: object) -> None:
    """End the command once: running checks are killed."""
    signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)


def find_cards(dry_run: bool) -> tuple[dict[str, object], str]:
    """Find the cards, as a separate process sees them: this one must not touch them, since it forks others."""
    if dry_run:
        return {"device": "cpu", "dry_run": True, "cards": 2, "gib": None}, "a CPU instead of two cards"
    cards = doctor.ask("torch")["cards"].get("cards", [])
    if not cards:
        raise SbkitError("no-device", "torch finds no CUDA card on this machine", exit_code=1,
                         hint="sbkit doctor says why; --dry-run runs the same checks small, on the CPU")
    names = [card["name"] for card in cards]
    shown = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return {"device": "cuda:0", "dry_run": False, "cards": len(cards), "gib": cards[0]["total"] / 2**30}, shown


def say(text: object) -> None:
    """Print to standard error at once."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
