"""Utterances whose transcript may be wrong: the model confidently heard something else."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sbkit.score.report.data import ScoredRun

#: The page's note on how far to trust this.
HONESTLY = (
    "A heuristic; nobody has listened yet. The model is fairly confident of what it heard here, and the transcript is "
    "much further from it than usual at this confidence. Possible reasons: a wrong transcript, a recording that was "
    "cut off, a name or number written in another way, or a model that is confident of its own mistake. Listen before "
    "you correct anything."
)
_EXCESS = 0.2  # share of the characters beyond what is usual at that confidence
_SURE = 0.25  # share of utterances, those with the lowest confidence, that are never suspected
_NEIGHBOURS = 100
_LEAST = 20  # utterances needed to tell what is usual
_RARELY_SILENT = 0.05  # if the model hears nothing more often than this, it tells nothing about the labels

#: Texts shown if there are no suspects.
NONE_SUSPECTED = "None: no transcript is much further from what was heard than usual at the model's confidence."
NOT_TOLD = f"Not checked: this needs at least {_LEAST} utterances with a known confidence."


class SuspectLabel(NamedTuple):
    """A suspected label; ``error`` and ``usual`` are shares of the reference's characters."""

    index: int  # type: ignore[assignment]  # hides a tuple method that nobody calls
    error: float
    usual: float


def suspects(results: ScoredRun) -> list[SuspectLabel]:
    """List utterances whose reference may be wrong, the most suspicious first."""
    if not can_judge(results):
        return []
    errors = np.minimum(results.character_rates, 1.0)
    sure = np.array([np.nan if one.confidence is None else one.confidence for one in results.heard])
    known = np.flatnonzero(~np.isnan(sure))
    order = known[np.argsort(sure[known], kind="stable")]
    usual = _running_median(errors[order], min(_NEIGHBOURS, max(_LEAST, len(order) // 4)))
    least = np.quantile(sure[known], _SURE)
    found = [SuspectLabel(int(i), float(errors[i]), float(median)) for i, median in zip(order, usual, strict=True)
             if sure[i] >= least and errors[i] - median >= _EXCESS]
    silent = [SuspectLabel(i, 1.0, 0.0) for i, one in enumerate(results.heard) if not one.hypothesis.split()]
    if len(silent) <= _RARELY_SILENT * len(results):
        found += silent
    return sorted(found, key=lambda suspect: suspect.usual - suspect.error)


def can_judge(results: ScoredRun) -> bool:
    """Whether there are enough utterances to tell what is usual."""
    return sum(one.confidence is not None for one in results.heard) >= _LEAST


def _running_median(values: np.ndarray, width: int) -> np.ndarray:
    """The median of the ``width`` values around each; at the ends, of the first or last ``width`` values."""
    width = min(width, len(values))
    medians = np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1)
    before = (width - 1) // 2
    return np.pad(medians, (before, len(values) - len(medians) - before), mode="edge")
