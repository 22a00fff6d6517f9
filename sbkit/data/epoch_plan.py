"""The plan of one epoch: which micro-batches each rank computes in each optimizer step.

``sbkit.data.plan`` decides which utterances are in which step. Here a step is cut into micro-batches that a device can
hold, as even as possible, and these are dealt to the ranks. So the number of ranks and the memory of a device change
the micro-batches, and never the steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sbkit.data.shapes import Shape


class MicroBatchLimits(NamedTuple):
    """What a micro-batch may hold; see ``sbkit.data.plan.Batching``."""

    max_seconds: float
    """Padding included."""
    max_utterances: int | None
    min_utterances: int
    clips: int
    """How many clips of a speaker stay together, as ``clips_per`` says; otherwise 1."""


class EpochPlan:
    """One epoch: an ordered list of optimizer steps, each a set of utterances of similar duration.

    durations: ``[N]``, seconds of each utterance of the corpus, rounded up.
    limits: of its micro-batches.
    members: the utterances of all passes, step by step as the sampler has drawn them. The number of a row in it is its
        place.
    bounds: the places at which steps begin, and the end.
    order: the numbers of steps, in the order in which they are trained on.
    pass_numbers: of each pass in the epoch, those of its members: which time the run uses them.
    shape_of: returns the shape and the number of a rank's micro-batches for (step number, world); None:
        micro-batches have the shapes of their utterances.
    """

    def __init__(self, durations: np.ndarray, limits: MicroBatchLimits, members: np.ndarray, bounds: np.ndarray,
                 order: np.ndarray, pass_numbers: Sequence[np.ndarray],
                 shape_of: Callable[[int, int], tuple[Shape, int] | None] | None):
        self.durations = durations
        self.limits = limits
        self.members = members
        self._bounds = bounds
        self._order = order
        self._pass_numbers = pass_numbers
        self._shape_of = shape_of
        self.padded = shape_of is not None

    def __len__(self) -> int:
        return len(self._order)

    def step(self, i: int) -> np.ndarray:
        """Indices of the utterances of step ``i``, ``[n]`` int64."""
        place = self._order[i]
        return self.members[self._bounds[place] : self._bounds[place + 1]]

    def pass_numbers(self, places: np.ndarray) -> np.ndarray:
        """Return the pass numbers of the utterances at these places of ``members``: which time the run uses them."""
        size = len(self._pass_numbers[0])
        return np.array([self._pass_numbers[place // size][place % size] for place in places], np.int64)

    def share(self, i: int, rank: int = 0, world: int = 1) -> list[np.ndarray]:
        """The micro-batches that ``rank`` of ``world`` computes in step ``i``, each as indices of utterances."""
        return [self.members[places] for places in self.micro_batches(i, rank, world)]

    def micro_batches(self, i: int, rank: int = 0, world: int = 1) -> list[np.ndarray]:
        """The micro-batches that ``rank`` of ``world`` computes in step ``i``, each as places in ``members``.

        All ranks get lists of the same length, with as few micro-batches as ``max_batch_seconds`` allows. Those of a
        step have about the same size, padding included, and each has utterances of similar duration. Some are empty if
        the step has fewer utterances than micro-batches.
        """
        of_all_ranks, count_per_rank = self._micro_batches_of_all_ranks(i, world)
        empty = np.zeros(0, dtype=np.int64)
        numbers = range(rank, count_per_rank * world, world)
        return [of_all_ranks[number] if number < len(of_all_ranks) else empty for number in numbers]

    def shape(self, i: int, world: int = 1) -> Shape | None:
        """The shape that the micro-batches of step ``i`` are padded to; None: each has that of its utterances."""
        padded = self._padded(i, world)
        return None if padded is None else padded[0]

    def _padded(self, i: int, world: int) -> tuple[Shape, int] | None:
        """The shape of the micro-batches of step ``i``, and their number on each rank; None if they have none."""
        return None if self._shape_of is None else self._shape_of(int(self._order[i]), world)

    def largest(self, lengths: np.ndarray, world: int = 1) -> list[tuple[np.ndarray, Shape | None]]:
        """The micro-batches of an epoch, on any rank, that may need the most memory, as places in ``members``, and the
        shape that each is padded to.

        These are the one with the most seconds, padding included, that with the longest utterance, with the most rows,
        with the most tokens, padding included, and with the most pairs of a second and a token.

        lengths : the number of tokens of each utterance, or what grows with it
        """
        largest: dict[int, tuple[float, np.ndarray, Shape | None]] = {}  # by the number of the measure
        for step in range(len(self)):
            shape = self.shape(step, world)
            micro_batches, _ = self._micro_batches_of_all_ranks(step, world)
            if shape is not None:  # all are padded to it
                micro_batches = micro_batches[:1]
            for places in micro_batches:
                if shape is not None:
                    count, longest, tokens = shape
                else:
                    rows = self.members[places]
                    count = len(rows)
                    longest = float(self.durations[rows].max())
                    tokens = lengths[rows].max()
                sizes = (count * longest, longest, count, count * tokens, count * longest * tokens)
                for measure, size in enumerate(sizes):
                    largest_size = largest[measure][0] if measure in largest else 0.0
                    if size > largest_size:
                        largest[measure] = (size, places, shape)
        different = {places.tobytes(): (places, shape) for _, places, shape in largest.values()}
        return list(different.values())

    @functools.lru_cache(maxsize=1)  # noqa: B019 (keeps one step, and this object lives for an epoch)
    def _micro_batches_of_all_ranks(self, i: int, world: int) -> tuple[list[np.ndarray], int]:
        """The micro-batches of step ``i`` on all ranks, as places in ``members``, and their number on each rank."""
        limits = self.limits
        clips = limits.clips
        number = self._order[i]
        start, stop = self._bounds[number : number + 2]
        places = np.arange(start, stop).reshape(-1, clips)  # a row stays together
        longest = self.durations[self.members[places]].max(1)
        longest_first = np.argsort(-longest, kind="stable")
        places = places[longest_first]

        padded = self._padded(i, world)
        if padded is not None:
            # All micro-batches get one shape, so they are even if they have as many utterances.
            _, count_per_rank = padded
            count = min(count_per_rank * world, max(1, len(places) // limits.min_utterances))
            return np.array_split(places.ravel(), count), count_per_rank

        seconds = (clips * longest[longest_first]).tolist()
        largest = (limits.max_utterances or places.size) // clips
        smallest = -(-limits.min_utterances // clips)
        fewest_cuts = _cut(seconds, limits.max_seconds, smallest, largest)
        assert fewest_cuts is not None, "the number of runs isn't limited here"
        count_per_rank = -(-len(fewest_cuts) // world)
        max_cuts = count_per_rank * world
        # The smallest limit of seconds for which this number is enough makes them as even as possible.
        low = sum(seconds) / max_cuts
        high = limits.max_seconds
        even_cuts = fewest_cuts
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            cuts = _cut(seconds, middle, smallest, largest, max_cuts)
            if cuts is None:
                low = middle
            else:
                even_cuts = cuts
                high = middle
        return [places[first:end].ravel() for first, end in even_cuts], count_per_rank


def _cut(seconds: list[float], max_seconds: float, least: int, most: int,
         max_cuts: int | None = None) -> list[tuple[int, int]] | None:
    """Cut descending durations into runs of at most ``max_seconds``, padding included, and ``least`` to ``most`` items.

    None if that takes more than ``max_cuts`` runs. If ``least`` requires it, a run has more seconds: at most those of
    ``2 * least - 1`` items, which fit into ``max_batch_seconds``.
    """
    cuts: list[tuple[int, int]] = []
    start = 0
    total = len(seconds)
    max_seconds *= 1 + 1e-6  # durations are float32
    while start < total:
        if max_cuts is not None and (len(cuts) == max_cuts or least * seconds[start] > max_seconds):
            return None
        remaining = total - start
        size = min(max(least, int(max_seconds / seconds[start])), most, remaining)
        if 0 < remaining - size < least:  # too few for a separate run
            size = remaining - least if remaining >= 2 * least else remaining
        cuts.append((start, start + size))
        start += size
    return cuts
