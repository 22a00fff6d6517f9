"""Further ranks on this machine's cores: processes that a run starts by itself, so that a laptop needs no torchrun.

The process that starts them is rank 0, and stays the one that is seen: it has the terminal, the progress bar, the
signals and the exit code. To the rest of sbkit they are ranks as torchrun starts them, with the same variables in their
environment. Two things that torchrun's agent does are done here:

- A rank that is killed ends the others: a thread of rank 0 waits for the ends of its processes, and announces one that
  had no time to do so itself (see ``failures``).
- A rank whose rank 0 is gone ends by itself (see ``launcher``).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from sbkit.errors import SbkitError
from sbkit.system import console, helper_process, memory
from sbkit.system.processes import ended_by, free_port, torchrun_environment
from sbkit.train.distributed import launcher
from sbkit.train.distributed.run_group import group

logger = logging.getLogger(__name__)

#: Time for ranks to end by themselves once rank 0 has failed, or the run is over.
_ENDING_SECONDS = 30.0
#: Time in which a rank that failed announces it by itself.
_ANNOUNCING_SECONDS = 3.0


def context(modules: Sequence[str] = ()) -> ForkServerContext:
    """Return the context for processes that are forked from one that has imported ``modules``, and nothing else.

    A fork of this process itself would be unsafe: torch has threads, which a fork doesn't have.
    """
    found = multiprocessing.get_context("forkserver")
    if sys.version_info >= (3, 11):  # before, the preload might import from the working directory
        found.set_forkserver_preload([__name__, *modules])
    return found


class LocalRanks(contextlib.AbstractContextManager["LocalRanks"]):
    """A context in which this process is rank 0 of several on this machine; with one rank, nothing changes.

    target : what each further rank runs, a function that can be pickled, with ``arguments``
    threads : of torch, in each rank
    """

    def __init__(self, ranks: int, threads: int, target: Callable[..., None], *arguments: Any):
        self._world = ranks
        self._threads = threads
        self._target = target
        self._arguments = arguments
        self._processes: list[BaseProcess] = []
        self._is_over = threading.Event()
        self._variables: dict[str, str] = {}

    def __enter__(self) -> LocalRanks:
        torch.set_num_threads(self._threads)
        if self._world == 1:
            return self
        port = free_port()
        self._processes = [start(context(), rank, self._world, port, self._threads, self._target, self._arguments)
                           for rank in range(1, self._world)]
        self._variables = torchrun_environment(0, self._world, port)
        os.environ.update(self._variables)
        threading.Thread(target=self._watch, name="local-ranks", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._is_over.set()
        for process in self._processes:
            process.join(_ENDING_SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()
        for name in self._variables:
            os.environ.pop(name, None)

    def _watch(self) -> None:
        """Announce a rank whose process ends before the run is over."""
        rank_of = {process.sentinel: rank for rank, process in enumerate(self._processes, 1)}
        process_of = {process.sentinel: process for process in self._processes}
        while rank_of:
            for ended in wait(list(rank_of)):
                assert isinstance(ended, int), "sentinels are numbers"
                rank = rank_of.pop(ended)
                process_of[ended].join()
                code = process_of[ended].exitcode
                if not code or self._is_over.is_set():
                    continue
                if code > 0 and self._is_over.wait(_ANNOUNCING_SECONDS):  # it announces its failure by itself
                    continue
                how = f"was killed by {ended_by(-code)}" if code < 0 else f"ended with code {code}"
                group.failures.announce_for(
                    rank, f"Rank {rank} {how}, so this run ends; run the same command to resume from the last "
                          "checkpoint" + (" (the system kills a process if memory runs out)" if code == -9 else ""))


def start(processes: ForkServerContext, rank: int, world: int, port: int, threads: int, target: Callable[..., None],
          arguments: Sequence[Any]) -> BaseProcess:
    """Start a process that is one rank of several on this machine."""
    environment = dict(os.environ)
    if world > 1:
        environment |= torchrun_environment(rank, world, port)
    settings = environment, threads, multiprocessing.get_start_method()
    process = processes.Process(target=_be_rank, args=(*settings, target, arguments), name=f"rank-{rank}")
    with helper_process.without_working_directory():
        process.start()
    return process


def _be_rank(environment: Mapping[str, str], threads: int, method: str, target: Callable[..., None],
             arguments: Sequence[Any]) -> None:
    """Run ``target`` as a rank, in a process of its own.

    environment : of rank 0, as it is now; the process that forks has the one of its own start
    method : how it starts its data workers, as rank 0 does; the default here would be the way in which it was started
    """
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(method, force=True)
    launcher.watch_rank_0()
    console.log_messages()
    memory.keep_freed_memory()
    torch.set_num_threads(threads)
    try:
        target(*arguments)
    except SbkitError as error:  # which rank 0 reports, see ``failures``
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # the terminal has sent it to all ranks
        sys.exit(130)

