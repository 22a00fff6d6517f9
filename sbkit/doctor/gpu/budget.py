"""Time budget: which checks are run, and how long each may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sbkit.doctor.gpu.check import Check

#: Seconds reserved for the corpus, the machine's table and the report.
APART = 30.0


def chosen(checks: Sequence[Check], seconds: float) -> list[Check]:
    """Choose the checks whose shares fit, in order: the most valuable come first."""
    left, found = seconds - APART, []
    for check in checks:
        if check.seconds <= left:
            left -= check.seconds
            found.append(check)
    return found


class Budget:
    """Computes how long the next check may take: its share, plus what earlier ones left over.

    >>> budget = Budget([a, b], seconds=100)            # doctest: +SKIP
    >>> budget.limit(a)                                 # doctest: +SKIP
    70.0
    """

    def __init__(self, checks: Sequence[Check], seconds: float, clock: Callable[[], float] = time.monotonic):
        self._waiting = {check.name: check.seconds for check in checks}
        self._clock, self._until = clock, clock() + seconds - APART

    def limit(self, check: Check) -> float:
        """The time limit of a check that starts now, so that every later one still has its share."""
        del self._waiting[check.name]
        return max(0.0, self._until - self._clock() - sum(self._waiting.values()))
