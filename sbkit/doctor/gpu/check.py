"""Checks of the cards: what they expect, what they observe, and their verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OK, SHORT, FAILED, NOT_RUN = "as expected", "short", "failed", "not run"
#: Verdicts that are no failure: something needed is missing (two cards, a package), or a card's target on a CPU.
NOT_SHOWN, REHEARSED = "not shown here", "rehearsed"
#: Verdicts for exit code 1: a check that wasn't run proves nothing.
BAD = (SHORT, FAILED, NOT_RUN)


@dataclass(frozen=True)
class Expect:
    """One expected line of the report."""

    key: str
    what: str
    expected: str
    cards: int = 1


@dataclass(frozen=True)
class Check:
    """A check, which runs in a separate process.

    function: ``module:function``, the module as seen from this package; it gets a ``Bench``
    seconds: its share of the ten minutes
    """

    name: str
    title: str
    function: str
    seconds: float
    expects: tuple[Expect, ...]

    @property
    def cards(self) -> int:
        """The fewest cards needed for any of its lines."""
        return min(each.cards for each in self.expects)


@dataclass(frozen=True)
class Observation:
    """What a check has observed for one of its lines."""

    key: str
    seen: str
    verdict: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Exit:
    """How a check's process ended: ``""`` if normally, otherwise what happened."""

    seconds: float
    how: str = ""
    late: bool = False
    """Whether it was stopped at its time limit."""


@dataclass
class Result:
    """The result of a check, with an observation for each line."""

    check: Check
    seen: list[Observation]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    log: str = ""

    def lines(self) -> list[tuple[Expect, Observation]]:
        """Pair expectations with observations, line by line."""
        return list(zip(self.check.expects, self.seen, strict=True))

    @property
    def verdict(self) -> str:
        """The worst verdict of its lines."""
        return next((bad for bad in (FAILED, SHORT, NOT_RUN) if any(each.verdict == bad for each in self.seen)),
                    next((good for good in (OK, REHEARSED) if any(each.verdict == good for each in self.seen)),
                         NOT_SHOWN))


def complete(check: Check, found: Iterable[Observation], notes: list[str], ended: Exit, cards: int, log: str) -> Result:
    """Make a result with a verdict for every line, even for those that the check did not reach."""
    by_key = {each.key: each for each in found}
    lines = []
    for expect in check.expects:
        if expect.key in by_key:
            lines.append(by_key[expect.key])
        elif expect.cards > cards:
            lines.append(Observation(expect.key, f"needs {expect.cards} cards", NOT_SHOWN))
        elif ended.late:
            lines.append(Observation(expect.key, ended.how, NOT_RUN))
        else:
            lines.append(Observation(expect.key, ended.how or "the check ended without reporting it", FAILED))
    return Result(check, lines, notes, ended.seconds, log)


def left_out(check: Check, why: str, verdict: str) -> Result:
    """Make the result of a check that wasn't run."""
    return Result(check, [Observation(each.key, why, verdict) for each in check.expects])


def passed(results: Sequence[Result]) -> bool:
    """Whether nothing falls short, and everything that could be run was."""
    return not any(each.verdict in BAD for result in results for each in result.seen)


def headline(results: Sequence[Result]) -> str:
    """Summarise the verdicts in one line.

    >>> kernels = Check("kernels", "", "", 1, (Expect("losses", "losses", ""), Expect("speed", "speed", "")))
    >>> headline([Result(kernels, [Observation("losses", "", OK), Observation("speed", "", SHORT)])])
    '1 of 2 as expected; short: kernels (speed)'
    """
    lines = [(result.check.name, expect.what, seen.verdict) for result in results for expect, seen in result.lines()]
    judged = [line for line in lines if line[2] not in (NOT_SHOWN, REHEARSED)]
    words = [f"{sum(line[2] == OK for line in judged)} of {len(judged)} as expected"]
    for verdict in (SHORT, FAILED):
        named = [f"{check} ({what})" for check, what, which in lines if which == verdict]
        words += [f"{verdict}: {', '.join(named)}"] if named else []
    for verdict in (NOT_RUN, NOT_SHOWN, REHEARSED):
        count = sum(line[2] == verdict for line in lines)
        words += [f"{count} {verdict}"] if count else []
    return "; ".join(words)
