"""Trials: steps of a recipe's Brain on noise, here or in a process with limited memory, to see what they need."""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sbkit.data.augment import planned_seconds
from sbkit.data.batch import Batch
from sbkit.data.loader import PREFETCH
from sbkit.data.manifest import Manifest
from sbkit.data.plan import Batching, Plan
from sbkit.errors import SbkitError
from sbkit.recipe import arguments, batch_size, flops, load
from sbkit.recipe.cost import StepMeasurement, longest_utterance
from sbkit.recipe.parts import permanently_frozen
from sbkit.recipe.reading import read
from sbkit.recipe.source import Findings
from sbkit.system import helper_process, memory
from sbkit.train import device as devices
from sbkit.train.memory.oom import is_out_of_memory

#: Maximum number of buckets to try.
MAX_BUCKETS = 6
#: Steps that ``sbkit check --measure`` times, after one for warm-up, and its time limit in seconds.
STEPS, MAX_SECONDS = 4, 60.0
#: Steps in which an optimizer does all of its periodic work, such as Muon's, and how many such cycles are timed.
CYCLE, CYCLES = 4, 3
#: Memory of a run on a CPU besides its steps: for tables of the corpus and transcripts, and for each data worker.
BASE_BYTES, WORKER_BYTES = 192 << 20, 128 << 20


class Trial:
    """A Brain for trial steps on noise, and the sizes to try."""

    def __init__(self, brain: Any, durations: np.ndarray, device: torch.device, cache: Path):  # a task
        self.brain = brain
        self.device = device
        self.cache = cache
        self.batching = brain.keys.batching
        self.longest = float(durations.max())
        self.typical = flops.typical_seconds(durations)
        self.most_seconds = self.batching.most_seconds(self.longest)
        edges = Plan(durations, Batching(self.most_seconds, self.batching.step_seconds)).edges.tolist()
        buckets = np.unique(np.linspace(0, len(edges) - 1, MAX_BUCKETS).round().astype(int))
        self.edges = [round(edges[bucket], 2) for bucket in buckets]

    @property
    def device_name(self) -> str:
        """The name of the GPU, or ``cpu``."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)

    def batch(self, utterances: int, seconds: float) -> Batch:
        """Return a batch of noise, with a usual number of labels."""
        return self.brain.dummy_batch(utterances, seconds, noise=True).to(self.device)

    def fits(self, utterances: int, seconds: float) -> bool:
        """Return whether a step on such a batch fits into memory."""
        return self.brain.trainer.fits(self.batch(utterances, seconds))


@contextlib.contextmanager
def open_trial(request: arguments.CommandLine, device: torch.device) -> Iterator[Trial]:
    """Build the recipe's Brain in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="sbkit-tune-") as folder:
        recipe = load.open_recipe(request.path, {**request.overrides, "output_folder": folder})
        model = batch_size.model_of(recipe.keys.modules)  # before a Brain replaces layers with faster equivalents
        brain = recipe.brain(request.run_opts, output_folder=None, schedule=None, checkpointer=None,
                             freeze=permanently_frozen(recipe.keys.freeze))
        brain.on_fit_start()
        brain.open_step(brain.optimizer_step + 1)
        brain.trainer.freezing.train()
        durations = _durations(recipe, request, Path(folder))
        logger = logging.getLogger("sbkit.train.distributed.unreached")  # the run itself will warn of unused layers
        before = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield Trial(brain, durations, device, batch_size.result_file(model, recipe.keys, brain.precision, device))
        finally:
            logger.setLevel(before)


def _durations(recipe: load.Recipe, request: arguments.CommandLine, folder: Path) -> np.ndarray:
    """Return the durations in the prepared corpus, if there is one; otherwise all lengths up to the longest allowed.

    folder : the temporary output folder with which the recipe was opened
    """
    corpus = recipe.keys.corpus
    manifest = corpus.manifest_path("train") if hasattr(corpus, "manifest_path") else None
    if manifest is not None and manifest.is_relative_to(folder):  # it is below the recipe's own output folder
        root = read(request.path, request.overrides, Findings())
        output_folder = root.value.get("output_folder") if root is not None else None
        if output_folder is not None:
            manifest = Path(str(output_folder.value)) / manifest.relative_to(folder)
    if manifest is None or not manifest.exists():
        return np.linspace(1.0, longest_utterance(recipe.hparams), 200)
    return planned_seconds(recipe.hparams.get("augment"), Manifest.open_prepared(manifest).durations)


# ---------------------------------------------------------------------------------------- with little memory


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
            raise SbkitError(f"a step on {utterances} utterances of {seconds:g} s fails: {failure}", exit_code=1)
        if not fits:
            self.__exit__()
        return fits


def _serve_trials(pipe: Connection, request: arguments.CommandLine, size: int, slack: float) -> None:
    """Answer, in the separate process, whether batches fit."""
    arguments.make_importable(request.path)
    memory.keep_freed_memory()  # as a run does
    with open_trial(request, torch.device("cpu")) as trial:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # hide libraries' last messages
        workers = trial.brain.keys.num_workers
        sample_rate = trial.brain.keys.sample_rate
        size -= BASE_BYTES + workers * WORKER_BYTES
        memory.bound(int(slack * size))
        while True:
            try:
                utterances, seconds = pipe.recv()
            except EOFError:
                return
            fits = False
            failure = ""
            try:
                batch_bytes = round(max(0.0, utterances * seconds) * sample_rate) * torch.float32.itemsize
                read_ahead = batch_bytes * (PREFETCH + 1) * workers  # by a run's data workers
                with mmap.mmap(-1, max(read_ahead, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
                    fits = trial.fits(utterances, seconds) and memory.peak() + read_ahead <= size
            except Exception as error:
                fits = False
                if not is_out_of_memory(error):
                    failure = f"{type(error).__name__}: {error}"
            pipe.send((fits, failure))


# ---------------------------------------------------------------------------------------------- measuring


def measure(request: arguments.CommandLine, planned: bool = False) -> StepMeasurement:
    """Time a few real steps at the planned size, for ``sbkit check --measure``.

    planned : also time steps of the run's size, to predict how long the run takes
    """
    device = devices.resolve(request.run_opts.device)
    with open_trial(request, device) as trial:
        seconds = trial.edges[-1]
        batch = trial.batch(max(1, int(trial.batching.max_batch_seconds / seconds)), seconds)
        measured = time_steps(trial.brain.try_batch, batch, device)
        if not planned:
            return measured
        batching = trial.batching
        audio = min(batching.update_seconds, batching.max_batch_seconds)
        utterances = max(batching.min_batch_utterances, round(audio / trial.typical))
        batch = trial.batch(utterances, audio / utterances)
        wait = torch.get_device_module(device).synchronize
        times = []
        for _ in range(CYCLES + 1):  # the first warms up, and of the others the fastest counts
            wait()
            started = time.perf_counter()
            for _ in range(CYCLE):
                trial.brain.try_batch(batch)
            wait()
            times.append(time.perf_counter() - started)
        return replace(measured, planned=min(times[1:]) / CYCLE / batch.padded_seconds,
                       planned_seconds=batch.padded_seconds)


def time_steps(step: Callable[[Batch], bool], batch: Batch, device: torch.device) -> StepMeasurement:
    """Return the median time of steps on one batch, after a first one for warm-up, and the peak of memory."""
    wait = torch.get_device_module(device).synchronize
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    for i in range(STEPS + 1):
        started = time.perf_counter()
        if not step(batch):
            raise SbkitError(f"a micro-batch of {batch.padded_seconds:.0f} s does not fit into the memory of {device}",
                             hint="sbkit tune finds the largest that does", exit_code=1)
        wait()
        if i or device.type == "cpu":  # the first step of a GPU loads kernels
            times.append(time.perf_counter() - started)
        if sum(times) > MAX_SECONDS:
            break
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return StepMeasurement(str(device), batch.padded_seconds, float(np.median(times)), peak)
