"""The few shapes to which micro-batches are padded on a GPU, where a graph is captured once for each shape.

Steps hold the same utterances with and without: neighbouring buckets, from which the plan draws its steps, share a
shape, and rows, samples and tokens are added to a micro-batch up to it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sbkit.data.buckets import Buckets

MAX_SHAPES = 32
#: A micro-batch has at most this many times ``max_batch_seconds``. Steps of two neighbouring buckets, with as many rows
#: as fit into ``max_batch_seconds`` each, would otherwise never have the same shape.
EXCESS = 1.05
#: More shapes must save at least this share of the padded seconds, since each is captured and has memory of its own.
WORTH = 0.001


class Shape(NamedTuple):
    """The size of a micro-batch: ``rows`` utterances of ``seconds`` with ``tokens`` tokens each."""

    rows: int
    seconds: float
    tokens: int

    def samples(self, sample_rate: int) -> int:
        """The samples of a row, with room for a sample that resampling may add."""
        return 16 * math.ceil((self.seconds * sample_rate + 1) / 16)


class Shapes(NamedTuple):
    """The shape of each bucket's micro-batches, and how many of them a rank computes in a step."""

    of_bucket: list[Shape]
    micros: list[int]


def choose_shapes(buckets: Buckets, tokens_of: np.ndarray, *, max_batch_seconds: float,
                  max_batch_utterances: int | None = None, least: int = 1, world: int = 1,
                  max_shapes: int = MAX_SHAPES) -> Shapes:
    """Group buckets so that at most ``max_shapes`` shapes need the least padded seconds.

    tokens_of: ``[N]``, the number of tokens of each utterance.
    max_batch_seconds, max_batch_utterances, least: limits of a micro-batch, as in ``Batching``.
    world: ranks that share a step.
    """
    # [K] each, of the buckets: the longest utterance, ascending, the number of steps, the utterances in the largest of
    # them, and the most tokens of an utterance.
    seconds = buckets.edges.astype(np.float64)
    steps = np.bincount(buckets.of_step, minlength=len(buckets.edges))
    tokens = np.zeros(len(seconds), np.int64)
    np.maximum.at(tokens, buckets.of_utterance, tokens_of)
    largest = np.zeros(len(seconds), np.int64)
    np.maximum.at(largest, buckets.of_step, buckets.lengths)
    count = len(seconds)
    room = 2 * least - 1  # rows at most, into which any number of utterances can be cut
    limit = EXCESS * max_batch_seconds
    most = max_batch_utterances or int(largest.max())

    def micro_batches(places: slice, capacity: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """Micro-batches of a rank in a step of each bucket, and rows of a micro-batch."""
        utterances = largest[places]
        micros = np.maximum(1, -(-utterances // (np.minimum(capacity, most) * world)))
        return micros, np.maximum(-(-utterances // (micros * world)), np.minimum(utterances, room))

    # Each bucket has as many micro-batches as it needs for max_batch_seconds if it has a shape of its own.
    capacities = np.maximum((max_batch_seconds * (1 + 1e-6) / seconds).astype(int), room)
    cost = np.full((count, count), math.inf)  # padded seconds, by the first and the last bucket of a group
    rows_of = {}  # by the last bucket of a group, [K] by the first one
    micros_of = {}
    for last in range(count):
        group = slice(0, last + 1)
        micros, rows = micro_batches(group, capacities[group])
        fewer = micro_batches(group, max(room, int(limit / seconds[last])))
        split = rows * seconds[last] > limit  # too many rows for the seconds of this group
        split[last] = False
        micros = np.where(split, fewer[0], micros)
        rows = np.where(split, fewer[1], rows)
        rows = np.maximum.accumulate(rows[::-1])[::-1]  # of the groups that begin with each bucket
        cost[group, last] = np.cumsum((steps[group] * micros)[::-1])[::-1] * world * rows * seconds[last]
        rows_of[last] = rows
        micros_of[last] = micros

    # Dynamic programming: totals[j], buckets 0..j in k + 1 groups; back[k][j], the last bucket before the last of them.
    totals = cost[0]
    back = [np.full(count, -1)]
    ends = [float(cost[0, -1])]
    for _ in range(min(max_shapes, count) - 1):
        options = totals[:-1, None] + cost[1:]  # [last bucket of the groups before, last bucket]
        before = options.argmin(0)
        fewest = options[before, np.arange(count)]
        back.append(np.where(fewest < totals, before, back[-1]))
        totals = np.minimum(totals, fewest)
        ends.append(float(totals[-1]))
    number = next(k for k, end in enumerate(ends) if end <= (1 + WORTH) * ends[-1])
    chosen = Shapes([Shape(0, 0.0, 0)] * count, [0] * count)
    last = count - 1
    while last >= 0:
        first = int(back[number][last]) + 1
        shape = Shape(int(rows_of[last][first]), float(seconds[last]), int(tokens[first:last + 1].max(initial=0)))
        for bucket in range(first, last + 1):
            chosen.of_bucket[bucket] = shape
            chosen.micros[bucket] = int(micros_of[last][bucket])
        last = first - 1
        number = max(0, number - 1)
    return chosen
