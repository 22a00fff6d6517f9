"""Cuts a long recording at pauses into pieces that are short enough for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sbkit.decode.spans import Word, at_pauses

#: The shortest pause to cut at.
PAUSE_SECONDS = 0.4
#: The longest silence that a piece keeps at each end.
MARGIN_SECONDS = 0.5


class Piece(NamedTuple):
    """A part of a recording in seconds, and its words."""

    start: float
    end: float
    words: list[Word]


def cut_at_pauses(words: Sequence[Word], duration: float, longest: float) -> list[Piece]:
    """Cut a recording longer than ``longest`` seconds at pauses; short neighbours are joined up to half of ``longest``.

    A recording that isn't longer, or has no words, is one piece. Audio between pieces has no words. A piece without a
    pause may be too long.
    """
    if duration <= longest or not words:
        return [Piece(0.0, duration, list(words))]
    joined: list[list[Word]] = []
    for run in at_pauses(words, PAUSE_SECONDS):
        if joined and run[-1].end - joined[-1][0].start <= longest / 2 and (
                run[0].start - joined[-1][-1].end <= 2 * MARGIN_SECONDS):
            joined[-1] += run
        else:
            joined.append(run)
    starts = [max(0.0, run[0].start - MARGIN_SECONDS) for run in joined]
    ends = [min(duration, run[-1].end + MARGIN_SECONDS) for run in joined]
    for i in range(1, len(joined)):
        if ends[i - 1] > starts[i]:  # a short pause: each piece gets half of it
            ends[i - 1] = starts[i] = (joined[i - 1][-1].end + joined[i][0].start) / 2
    return [Piece(start, end, run) for start, end, run in zip(starts, ends, joined, strict=True)]
