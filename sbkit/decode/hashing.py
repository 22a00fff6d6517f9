"""64-bit text hashes that can be extended by letters, for thousands of hypotheses in one operation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# hash(text + byte) = hash(text) * BASE + byte + 1, modulo 2^64. The empty text is 0.
BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)


def powers(lengths: np.ndarray) -> np.ndarray:
    """The factor for a hash when this many bytes are appended: [N] -> [N] uint64."""
    table = np.ones(int(lengths.max(initial=0)) + 1, dtype=np.uint64)
    table[1:] = BASE
    return np.multiply.accumulate(table)[lengths]


def prefixes(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Hash all prefixes of all texts, from the first byte to the whole text, one text after another.

    Returns the hashes [sum of lengths] and where each text's hashes begin [N + 1].
    """
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    begins = np.concatenate([[0], np.cumsum(lengths)])
    values = np.frombuffer(b"".join(texts), dtype=np.uint8).astype(np.uint64) + np.uint64(1)
    hashes = np.empty(len(values), dtype=np.uint64)
    current = np.zeros(len(texts), dtype=np.uint64)
    alive = np.argsort(-lengths, kind="stable")  # texts that are longer than the position, the longest first
    for position in range(int(lengths.max(initial=0))):
        alive = alive[: int(np.searchsorted(-lengths[alive], -position, side="left"))]
        at = begins[alive] + position
        current[alive] = current[alive] * BASE + values[at]
        hashes[at] = current[alive]
    return hashes, begins


def hash_all(texts: Sequence[bytes]) -> np.ndarray:
    hashes, begins = prefixes(texts)
    return np.where(np.diff(begins) > 0, hashes[np.maximum(begins[1:] - 1, 0)] if len(hashes) else 0, np.uint64(0))


def mix(hashes: np.ndarray) -> np.ndarray:
    """Mix the bits, so that any part of a hash can represent the whole."""
    hashes = (hashes ^ (hashes >> np.uint64(32))) * _MIX
    hashes = (hashes ^ (hashes >> np.uint64(32))) * _MIX
    return hashes ^ (hashes >> np.uint64(32))


class HashTable:
    """A table of values by hash, with batched lookup."""

    def __init__(self, hashes: np.ndarray, values: np.ndarray):
        order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[order]
        self.values = values[order]

    def get(self, hashes: np.ndarray, default: float | int) -> np.ndarray:
        """Look up the values [N] of hashes [N]; ``default`` if missing."""
        if not len(self.hashes):
            return np.full(len(hashes), default)
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[at] == hashes, self.values[at], default)
