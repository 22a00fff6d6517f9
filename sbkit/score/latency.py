"""Live transcripts: how long after a word's end it is final, and how often words change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sbkit.score import chunk_size, edits
from sbkit.score.edits import DELETION, EQUAL, INSERTION, SUBSTITUTION, Tokens
from sbkit.score.rates import ErrorRates
from sbkit.score.significance import interval

LATE = 95
"""The percentile of latencies that is reported beside their mean."""


class LiveTranscript(NamedTuple):
    """An utterance's transcript, and how it changed while it grew."""

    text: str  # the last one
    changed: int  # words that were shown and replaced later
    latencies: tuple[float, ...]  # seconds from the end of each correct word until it no longer changed


def match_words(before: Tokens, after: Tokens) -> tuple[list[int | None], int]:
    """Find which word of ``before`` each word of ``after`` is, None for a new one, and how many of ``before`` changed.

    A word that is continued is new, but its beginning did not change: ``at`` that becomes ``attic``.

    >>> match_words(["an", "at"], ["an", "attic", "room"]), match_words(["an", "at"], ["an", "odd", "room"])
    (([0, None, None], 0), ([0, None, None], 1))
    """
    if " ".join(after).startswith(" ".join(before)):  # it only grew: at most the last word is continued
        stays = sum(old == new for old, new in zip(before, after, strict=False))
        return [*range(stays), *[None] * (len(after) - stays)], 0
    [alignment] = edits.align([before], [after])
    same: list[int | None] = []
    changed = old = 0
    for step in alignment:
        if step in (EQUAL, SUBSTITUTION, INSERTION):
            same.append(old if step == EQUAL else None)
        if step == DELETION or (step == SUBSTITUTION and not after[len(same) - 1].startswith(before[old])):
            changed += 1
        old += step != INSERTION
    return same, changed


def stable_words(texts: Sequence[Tokens]) -> tuple[list[int], int]:
    """Follow words through texts that are shown one after the other.

    Returns for each word of the last text the index of the text since which it hasn't changed, and the number of words
    that changed.
    """
    since: list[int] = []
    changed = 0
    for number, (before, after) in enumerate(pairwise([(), *texts])):
        same, replaced = match_words(before, after)
        since = [number if old is None else since[old] for old in same]
        changed += replaced
    return since, changed


def live_transcript(texts: Sequence[str], times: Sequence[float], reference: Tokens,
                    ends: Sequence[float] | None) -> LiveTranscript:
    """Summarise the texts that were shown for an utterance.

    texts : what was shown, one text after the other; at least one
    times : when each was shown, in seconds
    reference : the words of the reference
    ends : when each of these ended, in seconds; None if unknown: no latency is measured
    """
    split = [text.split() for text in texts]
    since, changed = stable_words(split)
    latencies: list[float] = []
    if ends is not None:
        [alignment] = edits.align([reference], [split[-1]])
        reference_words = words = 0
        for step in alignment:
            if step == EQUAL:
                latencies.append(times[since[words]] - ends[reference_words])
            reference_words += step != INSERTION
            words += step != DELETION
    return LiveTranscript(texts[-1], changed, tuple(latencies))


@dataclass(frozen=True)
class LiveRates:
    """Rates of a test that was transcribed in chunks of one size, or as whole utterances."""

    chunk: int | None
    """Milliseconds; None for whole utterances."""
    WER: float
    WER_interval: tuple[float, float]
    latency: float | None
    """Mean over all correct words in seconds; None if none could be measured."""
    latency_p95: float | None
    measured: int
    """Number of these words."""
    changed: float
    """Words that were shown and replaced later, per 100 words of the last texts."""

    def row(self) -> list[Any]:
        """The row of a table with ``COLUMNS``."""
        low, high = self.WER_interval
        return [chunk_size.to_label(self.chunk), self.WER, f"{low:.2f} to {high:.2f}", self.latency, self.latency_p95,
                self.changed]

    def facts(self) -> dict[str, Any]:
        """The row's numbers for a file."""
        return {**asdict(self), "chunk": self.chunk or chunk_size.WHOLE}


COLUMNS = ("chunk", "WER %", "95 % interval", "latency s", f"{LATE} % within s", "changed %")


def rates(chunk: int | None, references: Sequence[tuple[str, str]],
          transcripts: Sequence[LiveTranscript]) -> LiveRates:
    """Score a test; ``references`` has the id and the reference of each utterance, none of them empty."""
    words = ErrorRates("word")
    words.add([name for name, _ in references], [reference for _, reference in references],
              [transcript.text for transcript in transcripts])
    latencies = np.array([latency for transcript in transcripts for latency in transcript.latencies])
    last_words = sum(len(transcript.text.split()) for transcript in transcripts)
    return LiveRates(
        chunk=chunk,
        WER=words.rate,
        WER_interval=interval(words),
        latency=float(latencies.mean()) if len(latencies) else None,
        latency_p95=float(np.percentile(latencies, LATE)) if len(latencies) else None,
        measured=len(latencies),
        changed=100 * sum(transcript.changed for transcript in transcripts) / max(1, last_words),
    )
