"""Trials on a CPU with limited memory, in a process of their own, which may run out of it."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from sbkit.data.loader import PREFETCH
from sbkit.errors import SbkitError
from sbkit.recipe import arguments
from sbkit.system import helper_process, memory
from sbkit.train.memory.oom import is_out_of_memory
from sbkit.train.memory.trials import Trial, open_trial

#: Memory of a run on a CPU besides its steps: for tables of the corpus and transcripts, and for each data worker.
BASE_BYTES, WORKER_BYTES = 192 << 20, 128 << 20


class BoundedTrial(contextlib.AbstractContextManager["BoundedTrial"]):
    """Trials on a CPU with limited memory, in a separate process.

    A process that ran out of memory is replaced: its heap is fragmented, and some libraries never recover. It does not
    matter whether it reports the lack of memory or dies.

    request : the command line of the recipe
    size : bytes for a whole run; a trial gets what is left for steps
    slack : the factor of the kernel's limit, which counts reserved memory; the memory in use decides
    """

    def __init__(self, request: arguments.CommandLine, size: int, slack: float = 1.0):
        self.request, self.size, self.slack = request, size, slack
        self._context = multiprocessing.get_context("forkserver")
        if sys.version_info >= (3, 11):  # before, the preload might import from the working directory
            self._context.set_forkserver_preload([__name__])  # each process starts with everything imported
        self._process: BaseProcess | None = None
        self._pipe: Connection  # while there is a process

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._pipe.close()  # ends a process that is waiting
            self._process.kill()
            self._process.join()
            self._process = None

    def fits(self, utterances: int, seconds: float) -> bool:
        """Return whether a step on such a batch fits into memory; if the process dies, it does not."""
        try:
            if self._process is None:
                self._pipe, child_pipe = self._context.Pipe()
                self._process = self._context.Process(target=_serve_trials,
                                                      args=(child_pipe, self.request, self.size, self.slack))
                with helper_process.without_working_directory():
                    self._process.start()
                child_pipe.close()
            self._pipe.send((utterances, seconds))
            fits, failure = self._pipe.recv()
        except (EOFError, ConnectionError):
            fits, failure = False, ""
        if failure:
            raise SbkitError("failed-trial",
                             f"a step on {utterances} utterances of {seconds:g} s fails: {failure}", exit_code=1)
        if not fits:
            self.__exit__()
        return fits


def _serve_trials(pipe: Connection, request: arguments.CommandLine, size: int, slack: float) -> None:
    """Answer, in the separate process, whether batches fit."""
    arguments.make_importable(request.path)
    memory.keep_freed_memory()  # as a run does
    with open_trial(request, torch.device("cpu")) as trial:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # hide libraries' last messages
        size -= BASE_BYTES + trial.brain.keys.num_workers * WORKER_BYTES
        memory.bound(int(slack * size))
        while True:
            try:
                utterances, seconds = pipe.recv()
            except EOFError:
                return
            try:
                answer = _fits_beside_workers(trial, utterances, seconds, size), ""
            except Exception as error:
                answer = False, "" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
            pipe.send(answer)


def _fits_beside_workers(trial: Trial, utterances: int, seconds: float, size: int) -> bool:
    """Return whether a step fits into ``size`` bytes, together with what the run's data workers read ahead."""
    keys = trial.brain.keys
    batch_bytes = round(max(0.0, utterances * seconds) * keys.sample_rate) * torch.float32.itemsize
    read_ahead = batch_bytes * (PREFETCH + 1) * keys.num_workers
    # Reserved, and not written to: so it counts for the kernel's limit, and is added to the peak here.
    with mmap.mmap(-1, max(read_ahead, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        return trial.fits(utterances, seconds) and memory.peak() + read_ahead <= size
