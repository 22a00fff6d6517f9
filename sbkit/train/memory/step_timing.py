"""How long steps take, measured on trials."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from sbkit.data.batch import Batch
from sbkit.errors import SbkitError
from sbkit.recipe import arguments
from sbkit.recipe.cost import StepMeasurement
from sbkit.train import device as devices
from sbkit.train.distributed import ranks
from sbkit.train.memory import trials
from sbkit.train.memory.trials import Trial

#: Steps that ``sbkit check --measure`` times, after one for warm-up, and its time limit in seconds.
STEPS, MAX_SECONDS = 4, 60.0
#: Steps in which an optimizer does all of its periodic work, such as Muon's, and how many such cycles are timed.
CYCLE, CYCLES = 4, 3


def measure(request: arguments.CommandLine, planned: bool = False) -> StepMeasurement:
    """Time a few real steps at the planned size, for ``sbkit check --measure``.

    planned : also time steps of the run's size, to predict how long the run takes
    """
    device = devices.resolve(request.run_opts.device)
    with trials.open_trial(request, device) as trial:
        seconds = trial.edges[-1]
        batch = trial.batch(max(1, int(trial.batching.max_batch_seconds / seconds)), seconds)
        measured = time_steps(trial.brain.try_batch, batch, device)
        if not planned:
            return measured
        batch = batch_of_planned_size(trial)
        return replace(measured, planned=fastest_step(trial, batch) / batch.padded_seconds,
                       planned_seconds=batch.padded_seconds)


def batch_of_planned_size(trial: Trial) -> Batch:
    """Return a batch of as many utterances of a usual length as a micro-batch of the run has."""
    utterances = _planned_utterances(trial)
    return trial.batch(utterances, _planned_seconds(trial) / utterances)


def share_of_planned_size(trial: Trial, rank: int, world: int) -> Batch | None:
    """Return a rank's share of such a batch; None, on all ranks, if some would have no utterance."""
    utterances = _planned_utterances(trial)
    if utterances < world:
        return None
    share = utterances * (rank + 1) // world - utterances * rank // world
    return trial.batch(share, _planned_seconds(trial) / utterances)


def _planned_seconds(trial: Trial) -> float:
    return min(trial.batching.update_seconds, trial.batching.max_batch_seconds)


def _planned_utterances(trial: Trial) -> int:
    return max(trial.batching.min_batch_utterances, round(_planned_seconds(trial) / trial.typical))


def fastest_step(trial: Trial, batch: Batch, patience: float = math.inf) -> float:
    """Return the seconds of a step in the fastest of some cycles of the optimizer's periodic work.

    patience : seconds for all cycles but the first, which warms up; one is timed in any case
    """
    warm_up = _cycle(trial, batch)
    cycles = torch.tensor([min(CYCLES, max(1.0, patience // warm_up))])
    ranks.take_from_main([cycles])  # they all take the same steps
    return min(_cycle(trial, batch) for _ in range(int(cycles))) / CYCLE


def _cycle(trial: Trial, batch: Batch) -> float:
    """Take the steps of a cycle, and return the seconds that they took."""
    wait = torch.get_device_module(trial.device).synchronize
    wait()
    started = time.perf_counter()
    for _ in range(CYCLE):
        trial.brain.try_batch(batch)
    wait()
    return time.perf_counter() - started


def time_steps(step: Callable[[Batch], bool], batch: Batch, device: torch.device) -> StepMeasurement:
    """Return the median time of steps on one batch, after a first one for warm-up, and the peak of memory."""
    wait = torch.get_device_module(device).synchronize
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    for i in range(STEPS + 1):
        started = time.perf_counter()
        if not step(batch):
            raise SbkitError("out-of-memory",
                             f"a micro-batch of {batch.padded_seconds:.0f} s does not fit into the memory of {device}",
                             hint="sbkit tune finds the largest that does", exit_code=1)
        wait()
        if i or device.type == "cpu":  # the first step of a GPU loads kernels
            times.append(time.perf_counter() - started)
        if sum(times) > MAX_SECONDS:
            break
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return StepMeasurement(str(device), batch.padded_seconds, float(np.median(times)), peak)
