"""``max_batch_seconds: auto``: what fits is measured before the first step of a run, which keeps the result."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import torch

from sbkit.errors import SbkitError
from sbkit.recipe.arguments import CommandLine
from sbkit.runs import initial
from sbkit.runs.keys import TaskKeys
from sbkit.runs.run_config import RunConfig
from sbkit.score.run_files import MEASURED
from sbkit.system import helper_process
from sbkit.system.console import atomic_write, stored_json
from sbkit.system.processes import torchrun_environment
from sbkit.train.distributed import ranks
from sbkit.train.memory import batch_size_search
from sbkit.train.memory.trials import open_trial

logger = logging.getLogger(__name__)

KEY = "max_batch_seconds"


def earlier_result(keys: TaskKeys, command: CommandLine) -> float | None:
    """The result of an earlier start, if the run has steps by it; an error if no result can be given."""
    if not keys.batching.auto:
        return None
    if not isinstance(command.overrides.get("batching", {}), dict):
        raise SbkitError("bad-option", "--batching: max_batch_seconds: auto needs arguments by name",
                         hint="give --batching.max_batch_seconds auto, and each other argument likewise",
                         key="batching")
    return None if initial.fresh(keys) else stored_json(keys.folder / MEASURED).get(KEY)


def measure(config: RunConfig) -> float:
    """Measure what fits on every rank, keep it in the run's folder, and return it.

    The first rank of each kind of device measures, in a process that leaves nothing behind here. The smallest result
    counts.
    """
    device = config.device
    processes_sharing = 1
    if device.type == "cpu":
        processes_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if config.cpu is None else config.cpu.ranks
    budget = batch_size_search.memory_budget(None, device) / processes_sharing
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    devices = ranks.gather_objects((device_name, budget))
    if device.type == "cpu":  # what is free differs from moment to moment
        devices = [min(devices)] * len(devices)

    result = math.inf, ""
    this_device = devices[ranks.rank()]
    if devices.index(this_device) == ranks.rank():
        _, gib = this_device
        result = _measure_in_process(config, gib)
    seconds, how = min(ranks.gather_objects(result))
    if not seconds:
        ranks.raise_on_main(SbkitError("no-batch-fits",
                                       f"max_batch_seconds: auto: {how}",
                                       hint=batch_size_search.SMALLER, exit_code=1,
                                       key="max_batch_seconds"))
    if ranks.is_main():
        logger.info("max_batch_seconds: auto is %g: %s", seconds, how)
        with atomic_write(config.folder / MEASURED) as out:
            json.dump({KEY: seconds, "measured": how}, out)
    return seconds


def _measure_in_process(config: RunConfig, gib: float) -> tuple[float, str]:
    """Measure on this rank's device with this much memory; returns seconds, 0 if nothing fits, and how they were found.
    """
    options = dataclasses.replace(config.run_opts, device=str(config.device))
    command = dataclasses.replace(config.whole_command, run_opts=options)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, command, config.device, gib))
    with helper_process.without_working_directory():
        process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        raise SbkitError("failed-trial", "max_batch_seconds: auto: the process that measures what fits ended early",
                         hint="give a number; sbkit tune finds one", key="max_batch_seconds") from None
    finally:
        process.kill()
        process.join()
    if isinstance(answer, SbkitError):
        raise answer
    return answer


def _serve(pipe: Connection, command: CommandLine, device: torch.device, gib: float) -> None:
    """Measure in a process that is no rank, and send seconds and how they were found, or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its run ends it
    for variable in torchrun_environment(0, 1, 0):
        os.environ.pop(variable, None)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with open_trial(command, device) as trial:
            pipe.send(batch_size_search.recommended(trial, batch_size_search.measure(trial, command, gib)))
    except SbkitError as error:
        pipe.send(SbkitError(error.code, error.message, hint=error.hint, exit_code=1))
