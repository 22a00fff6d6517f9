"""How a mixture of corpora is drawn: each part's share of every step, and its rows in its own shuffled order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError


class Parts(NamedTuple):
    """The parts of a mixture: the part number of each row, ``[N]``, each part's share of the audio by name, and the
    part that a pass goes through once."""

    numbers: np.ndarray
    shares: Mapping[str, float]
    once: str | None = None

    @classmethod
    def of(cls, train: Manifest) -> Parts | None:
        """The parts of a training set; None for a single corpus."""
        if not train.shares:
            return None
        places = pc.index_in(train.column("corpus").arrow, pa.array(train.shares, pa.large_string()))
        return cls(places.to_numpy(zero_copy_only=False), train.shares, train.once)


class PartSampler:
    """Draws each bucket's rows from several parts. All passes draw equally many, so steps keep their number and size.

    A bucket has an endless sequence of draws, in which each part is spread evenly by its share (Sainte-Laguë's method
    of dividing seats), and each pass takes the next ``sizes[bucket]`` of them. So a step, which is a run of this
    sequence, has all parts in proportion, and a pass is computed without those before it. A part's draws in a bucket go
    through its rows in an order that is reshuffled after each round, independently of other parts.

    parts: see ``Parts``; a part with a share of 0 is never drawn.
    seconds: ``[N]``, durations.
    buckets: ``[N]``, bucket numbers from 0.
    least: minimum number of draws from a bucket in a pass.
    seed: seed of the shuffling.

    >>> draws = PartSampler(Parts(np.array([0, 0, 0, 1]), {"a": 1, "b": 1}), np.ones(4), np.zeros(4, int))
    >>> draws.sizes.tolist(), draws.times.round(2).tolist(), draws.draw(1)[0].tolist().count(3)
    ([4], [0.67, 2.0], 2)
    """

    def __init__(self, parts: Parts, seconds: np.ndarray, buckets: np.ndarray, least: int = 1, seed: int = 0):
        shares = np.array(list(parts.shares.values()), np.float64)
        count = int(buckets.max()) + 1
        part_count = len(shares)
        audio = np.bincount(parts.numbers, weights=seconds, minlength=part_count)
        drawn = shares > 0
        if not (drawn & (audio > 0)).any() or (drawn & (audio == 0)).any():
            raise SbkitError("part-without-rows", "a part of the mixture has a weight, but no training audio",
                             hint="set its weight to 0")
        self.times = np.divide(shares / shares.sum() * audio[drawn].sum(), audio, where=drawn, out=np.zeros(part_count))
        if parts.once is not None:
            self.times /= self.times[list(parts.shares).index(parts.once)]
        """How often a pass draws each row of a part on average, ``[P]``."""
        # Small integers sort in linear time.
        strata = (buckets.astype(np.int64) * part_count + parts.numbers).astype(np.min_scalar_type(count * part_count))
        self._counts = np.bincount(strata, minlength=count * part_count).reshape(count, part_count)
        self._starts = np.concatenate([[0], np.cumsum(self._counts)])[:-1].reshape(count, part_count)
        self._rows = np.argsort(strata, kind="stable")
        salts = [hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest() for name in parts.shares]
        within = np.empty(len(seconds), np.uint64)
        order = np.argsort(parts.numbers.astype(np.min_scalar_type(part_count)), kind="stable")
        ends = np.cumsum(np.bincount(parts.numbers, minlength=part_count))
        within[order] = np.arange(len(order)) - np.concatenate([[0], ends])[parts.numbers[order]]
        self._keys = _scramble(within + np.frombuffer(b"".join(salts), np.uint64)[parts.numbers])
        self._wanted = self._counts * self.times
        wanted = self._wanted.sum(1)
        self.sizes = wanted.astype(np.int64)
        """How many rows of each bucket a pass has."""
        left = round(float(wanted.sum())) - int(self.sizes.sum())
        self.sizes[np.argsort(self.sizes - wanted, kind="stable")[:left]] += 1  # those with the largest remainders
        self.sizes[wanted > 0] = np.maximum(self.sizes, least)[wanted > 0]

    def drawn(self, passes: int) -> np.ndarray:
        """Return the number of draws of each part in each bucket in the first ``passes``, ``[buckets, P]``."""
        wanted = self._wanted
        seats = passes * self.sizes
        total = np.maximum(wanted.sum(1), 1e-300)
        part_count = wanted.shape[1]
        low = np.maximum(seats - part_count, 0) / total
        high = (seats + part_count + 1) / total

        def drawn_until(position: np.ndarray) -> np.ndarray:
            return np.floor(wanted * position[:, None] + 0.5)

        for _ in range(64):  # bisection: the last draw lies between low and high
            middle = (low + high) / 2
            below = drawn_until(middle).sum(1) <= seats
            low = np.where(below, middle, low)
            high = np.where(below, high, middle)
        certain = drawn_until(low)
        tied = drawn_until(high) - certain
        return (certain + tied * (tied.cumsum(1) <= (seats - certain.sum(1))[:, None])).astype(np.int64)

    def draw(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the rows of a pass, counted from 1, bucket by bucket, and the pass number of each row."""
        first, last = (self.drawn(passes) for passes in (number - 1, number))
        ends = np.cumsum((last - first).sum(1))
        rows = np.empty(ends[-1], np.int64)
        pass_numbers = np.empty(ends[-1], np.int32)
        for bucket, (begin, end) in enumerate(zip(first, last, strict=True)):  # a bucket fits into the CPU's cache
            at = slice(ends[bucket] - (end - begin).sum(), ends[bucket])
            rows[at], pass_numbers[at] = self._draw(bucket, begin, end)
        return rows, pass_numbers

    def _draw(self, bucket: int, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw the rows of one bucket from the ``first`` draw of each part to before the ``last``, as :meth:`draw`."""
        counts = self._counts[bucket]
        starts = self._starts[bucket]
        parts = np.flatnonzero(last > first)
        begun = first[parts] // counts[parts]
        rounds = (last[parts] - 1) // counts[parts] - begun + 1  # through all rows
        part = np.repeat(parts, rounds)
        turn = np.repeat(begun, rounds) + _counted(rounds)
        sizes = counts[part]
        which = np.repeat(np.arange(len(part)), sizes)
        rows = self._rows[np.repeat(starts[part], sizes) + _counted(sizes)]
        turns = turn[which]
        shuffled = np.lexsort((_scramble(self._keys[rows] ^ _scramble(turns.astype(np.uint64))), which))
        draws = turns * counts[part][which] + _counted(sizes)
        drawn = (draws >= first[part][which]) & (draws < last[part][which])
        rows = rows[shuffled][drawn]
        turns = turns[drawn]
        draws = draws[drawn]
        which = part[which[drawn]]
        line = np.argsort((draws + 0.5) / self._wanted[bucket][which], kind="stable")
        return rows[line], turns[line] + 1


def _counted(sizes: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, ... for each size, concatenated."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _scramble(numbers: np.ndarray) -> np.ndarray:
    """Map 64-bit numbers one-to-one to numbers that look random (SplitMix64)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
