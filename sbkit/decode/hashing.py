"""Texts as 64-bit numbers that grow letter by letter, so that thousands of hypotheses are spelled in one operation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# hash(text + byte) = hash(text) * BASE + byte + 1, modulo 2^64. The empty text is 0.
BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)


def powers(lengths: np.ndarray) -> np.ndarray:
    """What a hash is multiplied by when so many bytes follow: [N] -> [N] uint64."""
    table = np.ones(int(lengths.max(initial=0)) + 1, dtype=np.uint64)
    table[1:] = BASE
    return np.multiply.accumulate(table)[lengths]


def prefixes(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of all beginnings of all texts, from their first byte to the whole, one text after another.

    Gives the hashes [sum of lengths] and where each text's begin [N + 1].
    """
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    begins = np.concatenate([[0], np.cumsum(lengths)])
    values = np.frombuffer(b"".join(texts), dtype=np.uint8).astype(np.uint64) + np.uint64(1)
    hashes = np.empty(len(values), dtype=np.uint64)
    current, alive = np.zeros(len(texts), dtype=np.uint64), np.argsort(-lengths, kind="stable")
    for position in range(int(lengths.max(initial=0))):
        alive = alive[: int(np.searchsorted(-lengths[alive], -position, side="left"))]
        at = begins[alive] + position
        current[alive] = current[alive] * BASE + values[at]
        hashes[at] = current[alive]
    return hashes, begins


def hash_all(texts: Sequence[bytes]) -> np.ndarray:
    """The hash of each text: [N] uint64."""
    hashes, begins = prefixes(texts)
    return np.where(np.diff(begins) > 0, hashes[np.maximum(begins[1:] - 1, 0)] if len(hashes) else 0, np.uint64(0))


def mix(hashes: np.ndarray) -> np.ndarray:
    """Spread every bit over all others, so that any of them can stand for the whole."""
    hashes = (hashes ^ (hashes >> np.uint64(32))) * _MIX
    hashes = (hashes ^ (hashes >> np.uint64(32))) * _MIX
    return hashes ^ (hashes >> np.uint64(32))


class Table:
    """Values by hash, looked up many at a time."""

    def __init__(self, hashes: np.ndarray, values: np.ndarray):
        order = np.argsort(hashes, kind="stable")
        self.hashes, self.values = hashes[order], values[order]

    def __len__(self) -> int:
        return len(self.hashes)

    def get(self, hashes: np.ndarray, default: float | int) -> np.ndarray:
        """Values [N] of hashes [N], ``default`` for those that aren't there."""
        if not len(self.hashes):
            return np.full(len(hashes), default)
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[at] == hashes, self.values[at], default)
