"""The plan of an epoch: which utterances are in which optimizer step, derived from durations alone.

The steps depend only on (durations, their rounding, batching, epoch). Ranks, workers and micro-batches decide who
computes which part of a step, never what is in it, so a run on eight GPUs with accumulation takes the same optimizer
steps as a run on one. Step N is found without going through the steps before it, so resuming costs nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sbkit.data.options import check_number
from sbkit.errors import SbkitError

if TYPE_CHECKING:
    from sbkit.data.augment import Augment
    from sbkit.data.manifest import Manifest

#: The cost of a step besides its audio, as a share of a full step. It balances padding, which more buckets reduce,
#: against incomplete steps, of which each bucket adds half a one on average.
STEP_COST = 0.05
MAX_BUCKETS = 200
#: In a bucket of fewer steps, the utterances would hardly be mixed.
MIN_STEPS_PER_BUCKET = 2
#: A corpus of few steps whose padding exceeds this share gets narrower buckets: these (steps per bucket, cost of a
#: step) are tried in turn until the padding is below. With one step per bucket, every epoch has the same steps in
#: another order. A corpus of fewer than ``MIN_STEPS`` full steps is left alone: for it, full steps matter more.
MAX_PADDING, MIN_STEPS = 0.02, 10
NARROWER = ((2, STEP_COST), (1, STEP_COST), (1, 0.02), (1, 0.01))
#: Seconds to whose multiples batches are padded, which makes shapes recur. On a CPU oneDNN generates code for each new
#: number of frames (in bf16 20 ms a step, and memory), and on a GPU ``--compile`` records each shape. Without it cuDNN
#: and cuFFT make a plan for each new shape, in a few milliseconds, so half as much rounding is enough there: with
#: lengths as in Common Voice it pads 1.4 %, and of 3,900 batches of an epoch 155 have a new shape instead of 3,500.
ROUND_SECONDS, CARD_ROUND_SECONDS = 0.32, 0.16
#: Candidates for edges between buckets; more candidates take time and hardly reduce padding.
EDGE_CANDIDATES = 600


@dataclass
class Batching:
    """How utterances are grouped into micro-batches and optimizer steps; the ``batching`` of a recipe.

    Arguments
    ---------
    max_batch_seconds: size of a micro-batch, which one device holds at once, in seconds including padding.
    step_seconds: audio of one optimizer update over all devices and micro-batches, in seconds including
        padding; ``null``: as much as ``max_batch_seconds``.
    buckets: number of groups of similar duration, from which steps are drawn, at most 200; ``null``: the number with
        the least cost of padding and incomplete steps, or more if padding exceeds 2 %.
    max_batch_utterances: a second limit on a micro-batch; ``null``: none.
    seed: seed of the order of utterances and steps.
    sort: with ``ascending`` or ``descending``, the first epoch (epoch 1) is ordered by duration and later
        ones are shuffled; with ``null`` or ``random``, all epochs are shuffled.
    least_steps: how many optimizer steps a run takes at least: if ``number_of_epochs`` of the corpus have fewer, each
        epoch goes through the corpus several times. A recogniser needs a few hundred before it recognises anything; 0:
        no minimum.
    round_seconds: batches are padded to a multiple of it, as far as ``max_batch_seconds`` allows, so that shapes recur;
        0: no rounding; ``null``: 0.32 on a CPU and with ``--compile``, else 0.16.
    """

    max_batch_seconds: float
    step_seconds: float | None = None
    buckets: int | None = None
    max_batch_utterances: int | None = None
    seed: int = 1234
    sort: str | None = None
    round_seconds: float | None = None
    least_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("max_batch_seconds", "step_seconds", "buckets", "max_batch_utterances"):
            check_number(f"batching: {name}", getattr(self, name), above=0, optional=name != "max_batch_seconds",
                         whole=name in ("buckets", "max_batch_utterances"))
        check_number("batching: round_seconds", self.round_seconds, minimum=0, optional=True)
        check_number("batching: least_steps", self.least_steps, minimum=0, whole=True)
        check_number("batching: seed", self.seed, whole=True)
        if self.sort not in (None, "random", "ascending", "descending"):
            raise SbkitError(f"batching: sort is {self.sort!r}",
                             hint="it is one of ascending, descending, random")
        if self.step_seconds is None:
            self.step_seconds = self.max_batch_seconds

    @property
    def update_seconds(self) -> float:
        """``step_seconds`` as a number, which it is once the object is built."""
        assert self.step_seconds is not None
        return self.step_seconds

    def rounding(self, device_type: str, compiled: bool = False) -> float:
        """Seconds to whose next multiple batches are padded on a device of this type."""
        if self.round_seconds is not None:
            return self.round_seconds
        return ROUND_SECONDS if device_type == "cpu" or compiled else CARD_ROUND_SECONDS


class Plan:
    """The buckets and step sizes of a corpus, from which ``epoch(e)`` makes the steps of an epoch.

    Arguments
    ---------
    durations: ``[N]``, seconds of each utterance; the attribute ``durations`` has them rounded up.
    batching: see ``Batching``.
    ids: names of utterances for error messages.
    round_seconds: the ``Batching.rounding`` of the device. Buckets and batches are made from rounded durations, so
        that few shapes occur.
    epochs: epochs over which ``Batching.least_steps`` are spread: those that the run was to have when it began.

    An utterance longer than ``max_batch_seconds`` would not fit on the device; the error names it.

    >>> plan = Plan([1.0, 1.2, 5.0, 5.5], Batching(max_batch_seconds=6, step_seconds=11, buckets=2))
    >>> sorted(sorted(plan.epoch(1).step(i).tolist()) for i in range(2))
    [[0, 1], [2, 3]]
    """

    def __init__(self, durations: Sequence[float] | np.ndarray, batching: Batching,
                 ids: Sequence[str] | None = None, round_seconds: float = 0.0, epochs: int | None = None):
        self.batching, self.round_seconds = batching, round_seconds
        self.durations = np.ascontiguousarray(durations, dtype=np.float32)
        _refuse(self.durations, batching, ids)
        if round_seconds:
            rounded = (np.ceil(self.durations / round_seconds - 1e-4) * round_seconds).astype(np.float32)
            self.durations = np.maximum(self.durations, np.minimum(rounded, np.float32(batching.max_batch_seconds)))
        edges = _edges(self.durations, batching)
        # The bucket of each utterance; small integers sort in linear time.
        self._bucket = np.searchsorted(edges, self.durations, side="left").astype(np.uint16)
        sizes = np.bincount(self._bucket, minlength=len(edges))
        steps = np.empty(len(edges), dtype=np.int64)
        for k, (size, longest) in enumerate(zip(sizes.tolist(), edges.tolist(), strict=True)):
            fits = max(1, int(batching.update_seconds / longest + 1e-6))
            steps[k] = -(-size // fits)
        # The utterances of a bucket are spread evenly over its steps, so that the last step isn't nearly empty.
        parts = [np.diff(np.arange(n + 1) * size // n) for n, size in zip(steps, sizes, strict=True) if n]
        lengths = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        self._bounds = np.concatenate([[0], np.cumsum(lengths)])
        self.edges = edges
        self.passes = max(1, -(-batching.least_steps // (len(lengths) * epochs))) if epochs else 1
        """How often an epoch goes through the corpus."""

    @classmethod
    def of(cls, train: Manifest, batching: Batching, augment: Augment | None, epochs: int,
           round_seconds: float = 0.0) -> Plan:
        """Make the plan of a run, for utterances that ``augment`` may make longer or shorter."""
        durations = train.durations if augment is None else augment.planned(train.durations)
        return cls(durations, batching, ids=train.ids, round_seconds=round_seconds, epochs=epochs)

    def __len__(self) -> int:
        """The number of steps in an epoch."""
        return self.passes * (len(self._bounds) - 1)

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of one epoch, counted from 1; every epoch, and every pass in it, is shuffled differently."""
        steps, size = len(self._bounds) - 1, len(self.durations)
        passes = [self._pass(self.passes * (epoch - 1) + number) for number in range(1, self.passes + 1)]
        bounds = [self._bounds[:1], *(self._bounds[1:] + i * size for i in range(self.passes))]
        return EpochPlan(
            self.durations, self.batching, np.concatenate([members for members, _ in passes]), np.concatenate(bounds),
            np.concatenate([order + i * steps for i, (_, order) in enumerate(passes)]))

    def pass_number(self, epoch: int, step: int) -> int:
        """The pass over the corpus to which a step of an epoch belongs, counted from 1 over the whole run."""
        return self.passes * (epoch - 1) + step // (len(self._bounds) - 1) + 1

    def _pass(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The utterances of one pass over the corpus, bucket by bucket, and the order of its steps."""
        rng = np.random.Generator(np.random.PCG64([self.batching.seed % 2**64, number]))
        members = rng.permutation(len(self.durations))
        members = members[np.argsort(self._bucket[members], kind="stable")]
        order = rng.permutation(len(self._bounds) - 1)
        if number <= 1 and self.batching.sort in ("ascending", "descending"):
            # Steps are numbered bucket by bucket, the shortest first.
            order = np.arange(len(order))[:: 1 if self.batching.sort == "ascending" else -1]
        return members, order


class EpochPlan:
    """One epoch: an ordered list of optimizer steps, each a set of utterances of similar duration."""

    def __init__(self, durations: np.ndarray, batching: Batching, members: np.ndarray, bounds: np.ndarray,
                 order: np.ndarray):
        self.durations, self.batching = durations, batching
        self._members, self._bounds, self._order = members, bounds, order

    @property
    def steps(self) -> int:
        return len(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def step(self, i: int) -> np.ndarray:
        """Indices of the utterances of step ``i``, ``[n]`` int64."""
        place = self._order[i]
        return self._members[self._bounds[place] : self._bounds[place + 1]]

    def share(self, i: int, rank: int = 0, world: int = 1, min_micros: int = 1) -> list[np.ndarray]:
        """The micro-batches that ``rank`` of ``world`` computes in step ``i``, each as indices of utterances.

        All ranks get lists of the same length: ``min_micros``, or more if ``max_batch_seconds`` requires it. The
        micro-batches of a step have about the same size, padding included, and each has utterances of similar
        duration. Some are empty if the step has fewer utterances than micro-batches.
        """
        parts, micros = self._parts(i, world, min_micros)
        empty = np.zeros(0, dtype=np.int64)
        places = range(rank, micros * world, world)
        return [parts[place] if place < len(parts) else empty for place in places]

    def largest_micro_batch(self, i: int, world: int = 1, min_micros: int = 1) -> float:
        """Seconds, padding included, of the largest micro-batch of step ``i`` on any rank."""
        parts, _ = self._parts(i, world, min_micros)
        return max(len(part) * float(self.durations[part[0]]) for part in parts)

    @functools.lru_cache(maxsize=1)  # noqa: B019 (keeps one step, and this object lives for an epoch)
    def _parts(self, i: int, world: int, min_micros: int) -> tuple[list[np.ndarray], int]:
        members = self.step(i)
        members = members[np.argsort(-self.durations[members], kind="stable")]
        seconds = self.durations[members].tolist()
        batching = self.batching
        max_utterances = batching.max_batch_utterances or len(seconds)
        cuts = _cut(seconds, batching.max_batch_seconds, max_utterances)
        assert cuts is not None, "the number of runs isn't limited here"
        micros = max(min_micros, -(-len(cuts) // world))
        allowed = micros * world
        # The smallest size for which `allowed` parts are enough makes them as even as possible.
        low, high = sum(seconds) / allowed, batching.max_batch_seconds
        best = cuts
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            cuts = _cut(seconds, middle, max_utterances, allowed)
            if cuts is None:
                low = middle
            else:
                best, high = cuts, middle
        return [members[a:b] for a, b in best], micros


def _cut(seconds: list[float], cost: float, max_utterances: int,
         allowed: int | None = None) -> list[tuple[int, int]] | None:
    """Cut descending durations into runs of at most ``cost`` seconds, padding included.

    None if that takes more than ``allowed`` runs.
    """
    cuts: list[tuple[int, int]] = []
    start, total = 0, len(seconds)
    cost *= 1 + 1e-6  # durations are float32
    while start < total:
        if allowed is not None and (len(cuts) == allowed or seconds[start] > cost):
            return None
        stop = min(start + min(max(1, int(cost / seconds[start])), max_utterances), total)
        cuts.append((start, stop))
        start = stop
    return cuts


def _refuse(durations: np.ndarray, batching: Batching, ids: Sequence[str] | None) -> None:
    if not len(durations):
        raise SbkitError("the training set is empty", hint="prepare_report.json says what was left out")

    def some(wrong: np.ndarray) -> str:
        shown = [f"{ids[i] if ids is not None else f'row {i}'} ({durations[i]:.2f} s)" for i in wrong[:5]]
        return ", ".join(shown) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")

    wrong = np.flatnonzero(~(np.isfinite(durations) & (durations > 0)))
    if len(wrong):
        raise SbkitError(f"utterances without a duration: {some(wrong)}", hint="prepare the corpus again")
    long = np.flatnonzero(durations > batching.max_batch_seconds * (1 + 1e-6))
    if len(long):
        raise SbkitError(
            f"utterances longer than max_batch_seconds ({batching.max_batch_seconds:g} s), what a device "
            f"holds at once: {some(long)}",
            hint="raise max_batch_seconds, or prepare with a smaller max_duration",
        )


def _edges(durations: np.ndarray, batching: Batching) -> np.ndarray:
    """Upper edges of the buckets, ascending: as many as ``batching`` says, or the number of least cost."""
    ordered = np.sort(durations)
    total = float(ordered.sum(dtype=np.float64))
    # Candidates: equal shares of the utterances, and equal steps of duration for the tails.
    places = np.linspace(0, len(ordered) - 1, EDGE_CANDIDATES // 2).astype(np.int64)
    levels = np.linspace(ordered[0], ordered[-1], EDGE_CANDIDATES // 2, dtype=np.float32)
    at_levels = np.searchsorted(ordered, levels, side="right") - 1
    candidates = np.unique(ordered[np.concatenate([places, at_levels[at_levels >= 0], [len(ordered) - 1]])])
    below = np.searchsorted(ordered, candidates, side="right").astype(np.float64)
    if batching.buckets is not None:
        return _few_buckets(candidates, below, batching, total)
    edges = _few_buckets(candidates, below, batching, total)
    for least, step_cost in NARROWER if total >= MIN_STEPS * batching.update_seconds else ():
        sizes = np.diff(np.searchsorted(ordered, edges, side="right"), prepend=0)
        if 1 - total / float(sizes @ edges.astype(np.float64)) <= MAX_PADDING:
            break
        edges = _full_steps(candidates, below, batching.update_seconds, least, step_cost)
    return edges


def _few_buckets(candidates: np.ndarray, below: np.ndarray, batching: Batching, total: float) -> np.ndarray:
    """The edges with the least padding for ``batching.buckets``; if that is null, for the number of least cost.

    Dynamic programming finds the best choice among the candidates; a bucket costs its members times its edge.
    """
    max_buckets = batching.buckets
    if max_buckets is None:
        max_buckets = max(1, int(total / batching.update_seconds / MIN_STEPS_PER_BUCKET))
    max_buckets = min(max_buckets, MAX_BUCKETS, len(candidates))
    # cost[k][j]: candidates 0..j in k+1 buckets, the last of which ends at j.
    cost = below * candidates
    back, totals = [], [cost[-1]]
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
    if batching.buckets is None:
        halves = np.arange(1, max_buckets + 1) / 2
        best = int(np.argmin(np.array(totals) * (1 + STEP_COST) + STEP_COST * batching.update_seconds * halves))
        back = back[:best]
    chosen, j = [len(candidates) - 1], len(candidates) - 1
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
    best, previous = np.zeros(len(before)), np.zeros(len(before), np.int64)
    for j in range(len(candidates)):
        costs = best[: j + 1] + cost[: j + 1, j]
        previous[j + 1] = np.argmin(costs)
        best[j + 1] = costs[previous[j + 1]]
    chosen, j = [], len(candidates)
    while j:
        chosen.append(j - 1)
        j = int(previous[j])
    return candidates[chosen[::-1]]
