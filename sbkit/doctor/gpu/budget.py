"""Ten minutes shared out: which checks are run, and how long each of them may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sbkit.doctor.gpu.check import Check

#: Seconds of the whole that no check may have: the corpus, the table of the machine and the report.
APART = 30.0


def chosen(checks: Sequence[Check], seconds: float) -> list[Check]:
    """Those whose shares have room, the first ones first: they are ordered by what they are worth."""
    left, found = seconds - APART, []
    for check in checks:
        if check.seconds <= left:
            left -= check.seconds
            found.append(check)
    return found


class Budget:
    """How long the next check may take: its share, and what those before it have left.

    >>> budget = Budget([a, b], seconds=100)            # doctest: +SKIP
    >>> budget.limit(a)                                 # doctest: +SKIP
    70.0
    """

    def __init__(self, checks: Sequence[Check], seconds: float, clock: Callable[[], float] = time.monotonic):
        self._waiting = {check.name: check.seconds for check in checks}
        self._clock, self._until = clock, clock() + seconds - APART

    def limit(self, check: Check) -> float:
        """Seconds for a check that starts now, so that each one behind it still has its share."""
        del self._waiting[check.name]
        return max(0.0, self._until - self._clock() - sum(self._waiting.values()))
