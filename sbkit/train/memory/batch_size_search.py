"""Search for the largest batch that fits into a given memory, by trying sizes for each bucket."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from sbkit.errors import SbkitError
from sbkit.recipe.arguments import CommandLine
from sbkit.recipe.batch_size import MARGIN, BatchSize, cached, store
from sbkit.recipe.cost import GIB
from sbkit.system import memory
from sbkit.system.console import progress, table
from sbkit.train.memory.bounded_trial import BoundedTrial
from sbkit.train.memory.trials import Trial

#: Relative precision of the number of utterances.
PRECISION = 0.04
#: Number of batches in a rehearsal, and the factor of their size after one that did not fit.
REHEARSED, SHRINK = 12, 0.9
#: Factor of the memory that a rehearsal on a CPU may reserve: fragmented memory is reserved but not in use.
SLACK = 2.0
#: Share of a CPU's free memory to use; the rest is for data workers and other processes.
FREE_SHARE = 0.8
#: What to do where nothing fits.
SMALLER = "try a device with more memory, activation_checkpointing, or a smaller model or max_duration"


def measure(trial: Trial, request: CommandLine, gib: float, fresh: bool = False) -> BatchSize:
    """Find the batch sizes that fit into ``gib`` GiB, and rehearse them with batches of many lengths in a row.

    fresh : try even if the result is in the cache
    """
    for earlier in [] if fresh else cached(trial.cache):
        if (earlier.gib, earlier.edges, earlier.most) == (gib, trial.edges, trial.most_seconds):
            print(f"from the cache, {trial.cache} (sbkit tune --fresh tries again)", file=sys.stderr)
            return earlier
    with _fits(trial, request, gib) as fits:
        counts = search(trial.edges, fits, trial.most_seconds / MARGIN)
    with _fits(trial, request, gib, SLACK) as fits:
        result = rehearse(BatchSize(gib, trial.edges, counts, trial.most_seconds), fits)
    try:
        store(trial.cache, result)
    except SbkitError as error:  # the result still counts
        print(f"warning: the result was not cached: {error} [{error.code}]", file=sys.stderr)
    return result


def memory_budget(requested: float | None, device: torch.device) -> float:
    """Return the GiB that a run may use: those requested, or those available."""
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    elif device.type != "cpu":
        raise SbkitError("memory-not-limited", f"can't try batches on {device}, because its memory can't be limited",
                         hint="sbkit check estimates what a batch needs")
    elif not memory.can_bound():
        raise SbkitError("memory-not-limited",
                         f"can't try batches on the CPU: {platform.system()} can't limit the memory of a process",
                         hint="sbkit check estimates what a batch needs")
    else:
        available = memory.total()
    if requested is not None and not 0 < requested <= available / GIB:
        raise SbkitError("bad-value", f"--memory {requested:g}: there are {available / GIB:.1f} GiB",
                         hint="leave it out, or give a number above 0 and at most that", key="memory", value=requested)
    if requested is not None or device.type == "cuda":
        return round(available / GIB if requested is None else requested, 2)
    free = FREE_SHARE * memory.available() / GIB
    return float(int(free)) if free >= 2 else round(free, 1)  # rounded, so that the next call finds this result


@contextlib.contextmanager
def _fits(trial: Trial, request: CommandLine, gib: float, slack: float = 1.0) -> Iterator[Callable[[int, float], bool]]:
    """Yield a function that returns whether a number of utterances of a given length fits."""
    if trial.device.type == "cpu":
        with BoundedTrial(request, int(gib * GIB), slack) as bounded:
            yield bounded.fits
        return
    total = torch.cuda.get_device_properties(trial.device).total_memory / GIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib / total), trial.device)
    yield trial.fits


def search(edges: Sequence[float], fits: Callable[[int, float], bool], max_seconds: float,
           show: bool = True) -> list[int]:
    """Find the largest number of utterances for each bucket by trying.

    edges : seconds of the longest utterance of each bucket, ascending
    fits : returns whether a step on (utterances, seconds of each) fits
    max_seconds : the size that no batch needs to exceed
    """
    counts: list[int] = []
    seconds_that_fit = 0.0  # in the bucket before
    bar = progress(list(reversed(edges)), what="buckets tried", unit="bucket", show=show)
    for edge in bar:  # longest first: its result is where the search for shorter ones starts
        max_count = max(1, math.ceil(max_seconds / edge))
        count = min(max_count, max(1, int(seconds_that_fit / edge)))
        fitting = 0  # the largest count that fits; 0: not even 1
        too_large = max_count + 1  # the smallest that doesn't
        while fitting < count < too_large:  # double or halve, until the limit is between the two
            if fits(count, edge):
                fitting = count
                count = min(2 * count, max_count)
            else:
                too_large = count
                count = max(count // 2, 1)
        while too_large - fitting > max(1, PRECISION * fitting):
            middle = (fitting + too_large) // 2
            if fits(middle, edge):
                fitting = middle
            else:
                too_large = middle
        counts.append(fitting)
        seconds_that_fit = fitting * edge
    return counts[::-1]


def rehearse(sizes: BatchSize, fits: Callable[[int, float], bool]) -> BatchSize:
    """Return the sizes, reduced until batches of many lengths fit one after the other.

    Memory freed by batches of one shape can't always be used by those of another.
    """
    longest = sizes.edges[-1]
    lengths = np.random.default_rng(0).uniform(min(sizes.edges[0], longest / 4), longest, REHEARSED).tolist()
    while sizes.seconds and not all(fits(max(1, int(sizes.seconds / length)), length) for length in lengths):
        sizes = dataclasses.replace(sizes, share=SHRINK * sizes.seconds / sizes.at_once)
    return sizes


def recommended(trial: Trial, sizes: BatchSize) -> tuple[float, str]:
    """Return the ``max_batch_seconds`` that follows from a result, 0 if nothing fits, and how it was found.

    It has room for the longest utterances, which may fit without the margin only.
    """
    where = f"{trial.device_name} with {sizes.gib:.3g} GiB, {trial.brain.precision}"
    least = math.ceil(trial.longest * trial.batching.min_capacity)
    if not sizes.seconds or sizes.fits[-1] < trial.batching.min_capacity:
        return 0, f"{where}: not even one of the longest utterances fits"
    if sizes.share * sizes.at_once >= sizes.most:
        return sizes.most, f"{where}: more has no effect, since no step is larger"
    return max(sizes.seconds, least), f"{where}: {sizes.share:.0%} of what fits"


def summary(trial: Trial, sizes: BatchSize) -> str:
    """Return a table of the result, and the recommended value, as text."""
    rows = [[f"up to {edge:.1f} s", count, f"{count * edge:.0f}"]
            for edge, count in zip(sizes.edges, sizes.fits, strict=True)]
    seconds, how = recommended(trial, sizes)
    in_recipe = "auto" if trial.batching.auto else f"{trial.batching.max_batch_seconds:g}"
    advice = f"--max_batch_seconds {seconds:g} (the recipe has {in_recipe})" if seconds else SMALLER
    return f"{table(['utterance length', 'utterances that fit', 'seconds'], rows)}\n{how}: {advice}"
