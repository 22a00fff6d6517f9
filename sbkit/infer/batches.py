"""Which signals run together: one plan for all models, of batches of similar lengths within a limit of memory."""

from __future__ import annotations

from collections.abc import Sequence


def batch_seconds(device: str) -> float:
    """The default audio in one batch, including padding: larger batches exceed a CPU's caches, smaller ones don't use a
    whole GPU."""
    return 480.0 if device != "cpu" else 20.0


def rows_within(limit: float, longest: int) -> int:
    """How many signals, padded to the longest, are within a limit; one that is longer runs alone."""
    return max(1, int(limit // max(1, longest)))


def plan_batches(lengths: Sequence[int], limit: float, batching: bool = True) -> list[list[int]]:
    """Group signals by length, so that little is padding; returns the indices of each batch, the longest first.

    limit : length of a batch, including padding
    batching : False runs each alone

    >>> plan_batches([1, 5, 2, 4], limit=10)
    [[1, 3], [2, 0]]
    """
    indices = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    batches: list[list[int]] = []
    while indices:
        rows = rows_within(limit, lengths[indices[0]]) if batching else 1
        batches.append(indices[:rows])
        del indices[:rows]
    return batches
