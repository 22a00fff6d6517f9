"""Pads parts of recordings or texts to the batch that a graph takes. Needs only numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pad(parts: Sequence[np.ndarray], min_length: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Pad parts [N, ...] with zeros to one array [B, ``min_length`` or more, ...]; returns it and the lengths [B]."""
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    batch = np.zeros((len(parts), max(min_length, int(lengths.max())), *parts[0].shape[1:]), dtype=parts[0].dtype)
    for row, part in zip(batch, parts, strict=True):
        row[: len(part)] = part
    return batch, lengths
