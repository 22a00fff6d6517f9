"""Times layouts of a training on a CPU: the run's model takes steps on noise, in processes that leave nothing."""

from __future__ import annotations

import itertools
import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from sbkit.recipe import arguments
from sbkit.recipe.arguments import CommandLine
from sbkit.system import memory
from sbkit.system.cores import Layout
from sbkit.system.processes import free_port
from sbkit.train.distributed import local_ranks, ranks
from sbkit.train.memory import step_timing
from sbkit.train.memory.trials import Trial, open_trial

logger = logging.getLogger(__name__)

#: A layout with more ranks is tried only if the one before was not slower than this, times the fastest.
_WORSE = 1.15
#: Seconds for the steps of a layout, after those that warm up.
_PATIENCE = 4.0
#: The time in which processes must have answered: those of a large model need some for building it alone.
_SECONDS = 300.0
#: The time in which they must have ended after that.
_ENDING_SECONDS = 5.0


@dataclass(frozen=True)
class Timing:
    """What a trial of a layout has measured."""

    layout: Layout
    seconds: float
    """Of a step."""
    memory: int
    """Bytes of rank 0 at its peak."""
    computing: float
    """Share of the time in which its main thread had a core. One that never waits for others has one all the time,
    unless other programs need it."""


def measure(command: CommandLine, layouts: Sequence[Layout]) -> list[Timing]:
    """Time steps in each layout that is possible; those with more ranks only as long as that makes steps faster.

    command : gives all values of the recipe
    """
    timings: list[Timing] = []
    for world, group in itertools.groupby(layouts, key=lambda layout: layout.ranks):
        found = _measure_with(world, command, [layout.threads for layout in group])
        if not found:
            break
        best_before = min((timing.seconds for timing in timings), default=float("inf"))
        timings += found
        if min(timing.seconds for timing in found) > _WORSE * best_before:
            break
    return timings


def _measure_with(world: int, command: CommandLine, threads: Sequence[int]) -> list[Timing]:
    """Time steps with one number of ranks; nothing if that isn't possible."""
    processes = local_ranks.context([__name__])
    receiver, sender = processes.Pipe(duplex=False)
    port = free_port()
    started = [local_ranks.start(processes, rank, world, port, threads[0], _time_steps, (command, threads, sender))
               for rank in range(world)]
    sender.close()
    timings: list[Timing] = []
    try:
        if receiver.poll(_SECONDS):
            timings = receiver.recv()
    except EOFError:  # rank 0 has failed: the run itself fails likewise, and says why
        pass
    finally:
        for process in started:
            process.join(_ENDING_SECONDS)  # time to remove its temporary folder
            process.kill()
            process.join()
        receiver.close()
    fitting = memory.available()
    return [timing for timing in timings if world == 1 or world * timing.memory < fitting]


def _time_steps(command: CommandLine, threads: Sequence[int], answer: Connection) -> None:
    """Be one of the processes: time steps with each number of threads; rank 0 sends the answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends this process
    logging.getLogger().setLevel(logging.ERROR)  # the run itself says all this
    arguments.make_importable(command.path)
    device = torch.device("cpu")
    ranks.init(device)
    if not ranks.is_main():
        answer.close()  # so that rank 0 alone keeps the run waiting
    try:
        with open_trial(command, device) as trial:
            timings = _timings(trial, threads)
        if ranks.is_main():
            answer.send(timings)
    except Exception:
        # The run itself fails likewise, and says why. This process ends, and with it what others do together with it.
        logger.debug("a trial of a layout failed", exc_info=True)
    finally:
        ranks.shutdown()


def _timings(trial: Trial, threads: Sequence[int]) -> list[Timing]:
    """Time a rank's share of a step with each number of threads; nothing if some ranks would have no utterance."""
    batch = step_timing.share_of_planned_size(trial, ranks.rank(), ranks.world_size())
    if batch is None:
        return []
    timings = []
    for number in threads:
        torch.set_num_threads(number)
        began = time.perf_counter()
        began_computing = time.thread_time()
        seconds = step_timing.fastest_step(trial, batch, _PATIENCE)
        computing = (time.thread_time() - began_computing) / (time.perf_counter() - began)
        timings.append(Timing(Layout(ranks.world_size(), number), seconds, memory.peak(), computing))
    return timings
