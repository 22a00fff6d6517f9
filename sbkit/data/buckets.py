"""Buckets of utterances of similar duration, with the least padding and the fewest incomplete steps."""

from __future__ import annotations

import math

import numpy as np

from sbkit.data.part_sampler import Parts, PartSampler

#: The cost of a step besides its audio, as a share of a full step. It balances padding, which more buckets reduce,
#: against incomplete steps, of which each bucket adds half a one on average.
STEP_COST = 0.05
MAX_BUCKETS = 200
#: In a bucket of fewer steps, utterances would barely be shuffled.
MIN_STEPS_PER_BUCKET = 2
#: A corpus of few steps whose padding exceeds this share gets narrower buckets: these (steps per bucket, cost of a
#: step) are tried in turn until the padding is below. With one step per bucket, every epoch has the same steps in
#: another order. A corpus of fewer than ``MIN_STEPS`` full steps is excluded: there, full steps matter more.
MAX_PADDING = 0.02
MIN_STEPS = 10
NARROWER = ((2, STEP_COST), (1, STEP_COST), (1, 0.02), (1, 0.01))
#: Candidates for edges between buckets; more candidates take longer and barely reduce padding.
EDGE_CANDIDATES = 600


class Buckets:
    """Draws steps of utterances of similar duration: each bucket's are spread evenly over its steps.

    durations: ``[N]``, seconds.
    step_seconds: seconds in a step, padding included.
    buckets: number of buckets; ``None``: the one of least cost.
    least: minimum number of utterances in a step.
    parts: the parts of a mixture, drawn in proportion; otherwise a pass has each utterance once.
    seed: seed of the order in a part.
    """

    left_out = 0

    def __init__(self, durations: np.ndarray, step_seconds: float, buckets: int | None = None, least: int = 1,
                 parts: Parts | None = None, seed: int = 0):
        self.edges = bucket_edges(durations, step_seconds, buckets, least)
        # Small integers sort in linear time.
        self.of_utterance = np.searchsorted(self.edges, durations, side="left").astype(np.uint16)
        """The bucket of each utterance."""
        self.parts = None if parts is None else PartSampler(parts, durations, self.of_utterance, least, seed)
        sizes = np.bincount(self.of_utterance, minlength=len(self.edges)) if self.parts is None else self.parts.sizes
        lengths = [np.zeros(0, np.int64)]
        for size, longest in zip(sizes.tolist(), self.edges.tolist(), strict=True):
            fits = max(least, int(step_seconds / longest + 1e-6))
            steps = min(-(-size // fits), size // least)
            # Evenly, so that the last step isn't nearly empty.
            lengths.append(np.diff(np.arange(steps + 1) * size // steps) if steps else lengths[0])
        self.lengths = np.concatenate(lengths)
        """How many utterances each step has, bucket by bucket."""
        self.of_step = np.repeat(np.arange(len(self.edges)), [len(of_bucket) for of_bucket in lengths[1:]])
        """The bucket of each step."""

    def draw(self, rng: np.random.Generator, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the utterances of one pass, bucket by bucket, and the pass number of each."""
        if self.parts is not None:
            return self.parts.draw(number)
        members = rng.permutation(len(self.of_utterance))
        return members[np.argsort(self.of_utterance[members], kind="stable")], np.broadcast_to(number, len(members))


def bucket_edges(durations: np.ndarray, step_seconds: float, buckets: int | None = None, least: int = 1) -> np.ndarray:
    """Return the upper edges of ``buckets`` buckets, ascending; None: of the number of least cost. Each bucket has at
    least ``least`` utterances."""
    ordered = np.sort(durations)
    total = float(ordered.sum(dtype=np.float64))
    # Candidates: equal shares of the utterances, and equal steps of duration for the tails.
    places = np.linspace(0, len(ordered) - 1, EDGE_CANDIDATES // 2).astype(np.int64)
    levels = np.linspace(ordered[0], ordered[-1], EDGE_CANDIDATES // 2, dtype=np.float32)
    at_levels = np.searchsorted(ordered, levels, side="right") - 1
    candidates = np.unique(ordered[np.concatenate([places, at_levels[at_levels >= 0], [len(ordered) - 1]])])
    below = np.searchsorted(ordered, candidates, side="right").astype(np.float64)
    edges = _few_buckets(candidates, below, step_seconds, buckets, total)
    if buckets is None and total >= MIN_STEPS * step_seconds:
        for steps, step_cost in NARROWER:
            sizes = np.diff(np.searchsorted(ordered, edges, side="right"), prepend=0)
            if 1 - total / float(sizes @ edges.astype(np.float64)) <= MAX_PADDING:
                break
            edges = _full_steps(candidates, below, step_seconds, steps, step_cost)
    if least == 1:
        return edges
    merged_edges = []  # of buckets with at least ``least`` utterances each
    waiting = 0
    for edge, size in zip(edges.tolist(), np.bincount(np.searchsorted(edges, durations)).tolist(), strict=True):
        waiting += size
        if waiting >= least:
            merged_edges.append(edge)
            waiting = 0
    if waiting:
        merged_edges[-1] = edges[-1]
    return np.array(merged_edges, edges.dtype)


def _few_buckets(candidates: np.ndarray, below: np.ndarray, step_seconds: float, buckets: int | None,
                 total: float) -> np.ndarray:
    """The edges with the least padding for ``buckets``; if that is None, for the number of least cost.

    Dynamic programming finds the best choice among the candidates; a bucket costs its members times its edge.
    """
    max_buckets = buckets
    if max_buckets is None:
        max_buckets = max(1, int(total / step_seconds / MIN_STEPS_PER_BUCKET))
    max_buckets = min(max_buckets, MAX_BUCKETS, len(candidates))
    # cost[k][j]: candidates 0..j in k+1 buckets, the last of which ends at j.
    cost = below * candidates
    back = []
    totals = [cost[-1]]
    # step[i, j]: one bucket from behind candidate i up to candidate j.
    step = (below[None, :] - below[:, None]) * candidates[None, :]
    step[np.tril_indices(len(candidates))] = math.inf
    options = np.empty_like(step)
    for _ in range(max_buckets - 1):
        np.add(cost[:, None], step, out=options)
        previous = np.argmin(options, axis=0)
        better = options[previous, np.arange(len(candidates))]
        back.append(np.where(better < cost, previous, -1))
        cost = np.minimum(cost, better)
        totals.append(cost[-1])
    if buckets is None:
        halves = np.arange(1, max_buckets + 1) / 2
        best = int(np.argmin(np.array(totals) * (1 + STEP_COST) + STEP_COST * step_seconds * halves))
        back = back[:best]
    chosen = [len(candidates) - 1]
    j = len(candidates) - 1
    for previous in reversed(back):
        if previous[j] >= 0:
            j = int(previous[j])
            chosen.append(j)
    return candidates[chosen[::-1]]


def _full_steps(candidates: np.ndarray, below: np.ndarray, step_seconds: float, least: int,
                step_cost: float) -> np.ndarray:
    """Edges for small corpora: every bucket has at least ``least`` full steps, and their number follows from the cost.

    Dynamic programming finds the best choice among the candidates; a bucket costs its padded seconds and its steps.
    """
    fits = np.maximum(1, np.floor(step_seconds / candidates + 1e-6))
    before = np.concatenate([[0.0], below])
    sizes = below[None, :] - before[:-1, None]  # [i, j]: of the bucket from candidate i to candidate j
    steps = np.ceil(sizes / fits)
    cost = sizes * candidates + step_cost * step_seconds * steps
    cost[(sizes <= 0) | ((steps < least) & (before[:-1, None] > 0))] = math.inf
    best = np.zeros(len(before))
    previous = np.zeros(len(before), np.int64)
    for j in range(len(candidates)):
        costs = best[: j + 1] + cost[: j + 1, j]
        previous[j + 1] = np.argmin(costs)
        best[j + 1] = costs[previous[j + 1]]
    chosen = []
    j = len(candidates)
    while j:
        chosen.append(j - 1)
        j = int(previous[j])
    return candidates[chosen[::-1]]
