"""Cuts a transcribed recording in its pauses into pieces of the length that training takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sbkit.decode.spans import Word, at_pauses

#: A cut needs a pause of at least so many seconds, of which a piece keeps some at its ends.
PAUSE_SECONDS, MARGIN_SECONDS = 0.4, 0.5


class Piece(NamedTuple):
    """A part of a recording in seconds, and its words."""

    start: float
    end: float
    words: list[Word]

    @property
    def confidence(self) -> float | None:
        """The mean confidence of the words; None without any."""
        return sum(each.confidence for each in self.words) / len(self.words) if self.words else None


def cut_at_pauses(words: Sequence[Word], duration: float, longest: float) -> list[Piece]:
    """Cut a recording of ``duration`` seconds into pieces; neighbours are joined up to half of ``longest``.

    A recording that isn't longer, or has no words, is one piece, as it is. Of others, what lies between pieces has no
    words, and a piece without a pause may be too long.
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
    starts = [max(0.0, each[0].start - MARGIN_SECONDS) for each in joined]
    ends = [min(duration, each[-1].end + MARGIN_SECONDS) for each in joined]
    for i in range(1, len(joined)):
        if ends[i - 1] > starts[i]:  # a short pause, of which each takes half
            ends[i - 1] = starts[i] = (joined[i - 1][-1].end + joined[i][0].start) / 2
    return [Piece(*each) for each in zip(starts, ends, joined, strict=True)]
