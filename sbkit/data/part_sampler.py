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

    Where a draw is in the sequence: a part of which a pass wants w draws has its draws 0, 1, 2, ... at the positions
    0.5 / w, 1.5 / w, 2.5 / w, ..., and all parts' draws are sorted by position; those at the same position by the
    number of their part. So a part has floor(w x + 0.5) draws up to a position x.

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
        part_count = len(shares)
        audio = np.bincount(parts.numbers, weights=seconds, minlength=part_count)
        drawn = shares > 0
        if not (drawn & (audio > 0)).any() or (drawn & (audio == 0)).any():
            raise SbkitError("part-without-rows", "a part of the mixture has a weight, but no training audio",
                             hint="set its weight to 0")
        wanted_audio = shares / shares.sum() * audio[drawn].sum()
        self.times = np.divide(wanted_audio, audio, where=drawn, out=np.zeros(part_count))
        """How often a pass draws each row of a part on average, ``[P]``."""
        if parts.once is not None:
            self.times /= self.times[list(parts.shares).index(parts.once)]
        self._strata = _strata(parts.numbers, buckets, part_count)
        self._keys = _keys(parts, seed)
        self._wanted = self._strata.counts * self.times
        """How many draws of each part a pass wants from each bucket, ``[buckets, P]``; not whole numbers."""
        self.sizes = _sizes(self._wanted.sum(1), least)
        """How many rows of each bucket a pass has."""

    def drawn(self, passes: int) -> np.ndarray:
        """Return the number of draws of each part in each bucket in the first ``passes``, ``[buckets, P]``.

        In each bucket there are ``seats`` draws in these passes. The position of the last of them is found by bisection
        between ``low``, up to which there are at most as many draws, and ``high``, up to which there are more. In the
        end the two are as close as floating-point numbers get. So the draws up to ``low`` are certain, and those from
        there to ``high`` are at the same position: a tie. A part has at most one draw in it, since the draws of a part
        are 1 / w apart. And there are more tied draws than seats left, since with them there are more draws than seats.
        The parts with the lowest numbers get these seats, one each, so exactly all seats are taken.

        For example two rows of part a and one of part b with equal shares: each part wants 1.5 draws of a pass, which
        has 3, and both have theirs at 0.33, 1, 1.67, ... In the first pass 2 draws are certain, those at 0.33, and two
        are tied at 1, of which a gets the only seat left. After two passes the draws up to 1.67 are exactly 6.

        >>> sampler = PartSampler(Parts(np.array([0, 0, 1]), {"a": 1, "b": 1}), np.ones(3), np.zeros(3, int))
        >>> sampler.drawn(1).tolist(), sampler.drawn(2).tolist()
        ([[2, 1]], [[3, 3]])
        """
        wanted = self._wanted
        seats = passes * self.sizes
        total = np.maximum(wanted.sum(1), 1e-300)
        part_count = wanted.shape[1]

        def drawn_until(position: np.ndarray) -> np.ndarray:
            return np.floor(wanted * position[:, None] + 0.5)

        # Rounding changes each part's number by at most a half, so these are below and above the last draw.
        low = np.maximum(seats - part_count, 0) / total
        high = (seats + part_count + 1) / total
        for _ in range(64):
            middle = (low + high) / 2
            at_most_seats = drawn_until(middle).sum(1) <= seats
            low = np.where(at_most_seats, middle, low)
            high = np.where(at_most_seats, high, middle)

        certain = drawn_until(low)
        tied = drawn_until(high) - certain  # 0 or 1
        seats_left = seats - certain.sum(1)
        gets_seat = tied.cumsum(1) <= seats_left[:, None]
        return (certain + tied * gets_seat).astype(np.int64)

    def draw(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the rows of a pass, counted from 1, bucket by bucket, and the pass number of each row."""
        first = self.drawn(number - 1)
        last = self.drawn(number)
        ends = np.cumsum((last - first).sum(1))
        rows = np.empty(ends[-1], np.int64)
        pass_numbers = np.empty(ends[-1], np.int32)
        for bucket, (begin, end) in enumerate(zip(first, last, strict=True)):  # a bucket fits into the CPU's cache
            at = slice(ends[bucket] - (end - begin).sum(), ends[bucket])
            rows[at], pass_numbers[at] = self._draw(bucket, begin, end)
        return rows, pass_numbers

    def _draw(self, bucket: int, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw the rows of one bucket from the ``first`` draw of each part to before the ``last``, as :meth:`draw`.

        A part with n rows in the bucket goes through them in rounds: its draws 0 to n - 1 are round 0, the next n are
        round 1. A round is one permutation of the part's rows. So all rounds that these draws reach are written out
        whole, one after the other, each shuffled by itself; then the draws before ``first`` and from ``last`` on are
        cut off, and what is left is sorted by position.

        The second pass of the example in :meth:`drawn` has a's draw 2 and b's draws 1 and 2, at the positions 1.67, and
        1 and 1.67. With rows 0 and 1 of a, and 2 of b:

            round             a's 1    b's 1    b's 2
            rows, shuffled    1 0      2        2          row 1 is draw 2 of a, row 0 would be draw 3
            draws             2 3      1        2
            kept              yes no   yes      yes
            positions         1.67     1        1.67       so the pass is 2, 1, 2

        A row's pass number is its round, from 1: a pass through its part, of which there may be several in a pass, or
        a fraction of one.

        >>> sampler = PartSampler(Parts(np.array([0, 0, 1]), {"a": 1, "b": 1}), np.ones(3), np.zeros(3, int))
        >>> rows, rounds = sampler.draw(2)
        >>> rows.tolist(), rounds.tolist()
        ([2, 1, 2], [2, 2, 3])
        """
        counts = self._strata.counts[bucket]
        starts = self._strata.starts[bucket]
        parts = np.flatnonzero(last > first)
        first_round = first[parts] // counts[parts]
        last_round = (last[parts] - 1) // counts[parts]
        round_counts = last_round - first_round + 1

        # Of each round: its part, its number, and how many rows it has.
        part_of_round = np.repeat(parts, round_counts)
        number_of_round = np.repeat(first_round, round_counts) + _counted(round_counts)
        sizes = counts[part_of_round]

        # Of each row of each round: its round, its part, and the number of the round.
        round_index = np.repeat(np.arange(len(sizes)), sizes)
        part = part_of_round[round_index]
        round_number = number_of_round[round_index]
        rows = self._strata.rows[np.repeat(starts[part_of_round], sizes) + _counted(sizes)]

        # lexsort sorts by its last key first: rounds stay where they are, and the rows of each are shuffled.
        shuffle = _scramble(self._keys[rows] ^ _scramble(round_number.astype(np.uint64)))
        rows = rows[np.lexsort((shuffle, round_index))]
        draws = round_number * counts[part] + _counted(sizes)

        is_kept = (draws >= first[part]) & (draws < last[part])
        rows = rows[is_kept]
        round_number = round_number[is_kept]
        positions = (draws[is_kept] + 0.5) / self._wanted[bucket][part[is_kept]]
        order = np.argsort(positions, kind="stable")  # so that of a tie the lower part comes first, as in ``drawn``
        return rows[order], round_number[order] + 1


class _Strata(NamedTuple):
    """The rows of each part in each bucket."""

    counts: np.ndarray
    """How many there are, ``[buckets, P]``."""
    starts: np.ndarray
    """Where they begin in ``rows``, ``[buckets, P]``."""
    rows: np.ndarray
    """All rows by bucket, part and their own order, ``[N]``."""


def _strata(part_numbers: np.ndarray, buckets: np.ndarray, part_count: int) -> _Strata:
    """Sort rows by bucket and part."""
    bucket_count = int(buckets.max()) + 1
    stratum_count = bucket_count * part_count
    smallest_type = np.min_scalar_type(stratum_count)  # small integers sort in linear time
    strata = (buckets.astype(np.int64) * part_count + part_numbers).astype(smallest_type)
    counts = np.bincount(strata, minlength=stratum_count)
    starts = np.cumsum(counts) - counts
    shape = (bucket_count, part_count)
    return _Strata(counts.reshape(shape), starts.reshape(shape), np.argsort(strata, kind="stable"))


def _keys(parts: Parts, seed: int) -> np.ndarray:
    """Return a number that looks random for each row, ``[N]``, by which each round shuffles.

    It depends on the seed, on the part's name and on the row's number in its part alone. So a part keeps its order
    whatever it is mixed with.
    """
    part_count = len(parts.shares)
    digests = [hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest() for name in parts.shares]
    salts = np.frombuffer(b"".join(digests), np.uint64)
    by_part = np.argsort(parts.numbers.astype(np.min_scalar_type(part_count)), kind="stable")
    counts = np.bincount(parts.numbers, minlength=part_count)
    number_in_part = np.empty(len(by_part), np.uint64)
    number_in_part[by_part] = _counted(counts)
    return _scramble(number_in_part + salts[parts.numbers])


def _sizes(wanted: np.ndarray, least: int) -> np.ndarray:
    """Round the draws of each bucket to whole numbers with the same sum: the largest remainders are rounded up.

    least: minimum number of draws from a bucket that wants any.

    >>> _sizes(np.array([1.5, 2.2, 0.3]), least=1).tolist()  # 2, 2, 0, and then at least 1
    [2, 2, 1]
    """
    sizes = wanted.astype(np.int64)
    left = round(float(wanted.sum())) - int(sizes.sum())
    largest_remainders = np.argsort(sizes - wanted, kind="stable")[:left]
    sizes[largest_remainders] += 1
    return np.where(wanted > 0, np.maximum(sizes, least), sizes)


def _counted(sizes: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, ... for each size, concatenated.

    >>> _counted(np.array([3, 2])).tolist()
    [0, 1, 2, 0, 1]
    """
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _scramble(numbers: np.ndarray) -> np.ndarray:
    """Map 64-bit numbers one-to-one to numbers that look random (SplitMix64)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
