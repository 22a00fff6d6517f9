"""Batches from a manifest and a plan: worker processes read whole micro-batches in the plan's order.

What is in a batch depends only on (manifest, plan, epoch, step, rank, world), never on the number of workers.
Reading can start at any step of any epoch without reading what comes before.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import resource
import signal
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from sbkit.data.augment import Augment, planned_seconds
from sbkit.data.batch import SAMPLE_RATE, Batch, DevicePrefetcher
from sbkit.data.columns import BatchColumns
from sbkit.data.epoch_plan import EpochPlan
from sbkit.data.manifest import Manifest
from sbkit.data.nonspeech import NonSpeech
from sbkit.data.plan import Plan
from sbkit.data.reader import Failure, Reader, ReadRequest, SupportsEncode, init_worker, starting_workers
from sbkit.errors import SbkitError, first_line
from sbkit.system.processes import ended_by
from sbkit.system.schema import COUNT, SIZE, require

logger = logging.getLogger(__name__)

#: Micro-batches that each worker reads ahead.
PREFETCH = 4
#: Damaged recordings that an error names, and rows shorter than their recordings that are logged: few, since mostly one
#: has the cause of all.
NAMED = 5
#: Damaged recordings that are logged one by one.
LOGGED = 10 * NAMED


class _Requests(Sampler[ReadRequest]):
    """The requests for the workers; ``source`` is set before each iteration."""

    def __init__(self) -> None:
        self.source: Iterator[ReadRequest] = iter(())

    def __iter__(self) -> Iterator[ReadRequest]:
        return self.source


class QuietDataLoader(DataLoader[Any]):
    """A DataLoader that doesn't warn about more workers than cores: workers wait for files most of the time.

    Its dataset, or the dataset's ``reader``, records in ``reading`` which row each worker reads, so that an error can
    name it.
    """

    def check_worker_number_rationality(self) -> None:
        """Do nothing, where torch would warn."""

    def _get_iterator(self) -> Any:  # torch's, of a private class
        reader: Any = getattr(self.dataset, "reader", self.dataset)  # a Reader, or a dataset that keeps one
        if self.num_workers:
            reader.reading = torch.full((self.num_workers,), -1).share_memory_()
        iterator = super()._get_iterator()
        if self.num_workers:
            _started[iterator] = reader
        return iterator


T = TypeVar("T")
_AnyLoader = TypeVar("_AnyLoader", bound="_Loader")


class _Loader:
    """Base of both loaders: starts and ends worker processes, and counts damaged recordings."""

    def __init__(self, reader: Reader, max_batch_seconds: float, *, workers: int = 2,
                 pin_memory: bool = False, prefetch: int = PREFETCH, timeout: float = 600,
                 max_damaged_share: float = 0.01, damaged_floor: int = 10):
        require("workers (num_workers of a recipe)", workers, COUNT)
        require("prefetch", prefetch, SIZE)
        self.reader = reader
        self.workers = workers
        self.max_damaged_share = max_damaged_share
        self.damaged_floor = damaged_floor
        self.damaged: dict[str, str] = {}
        """The reason for each utterance id that could not be read so far."""
        self._warned_of: set[str] = set()  # utterances whose recordings go on after what their rows say
        self._pid = os.getpid()
        self._read = 0
        self._failed = 0
        self._iteration = 0
        """The number of the newest iteration, the only one that may go on: the workers read its requests."""
        self._requests = _Requests()
        parallel: dict[str, Any] = {}
        if workers:
            signals_per_row = 1 + len(reader.columns.signals)
            batch_bytes = int(max_batch_seconds * reader.sample_rate * torch.float32.itemsize * signals_per_row)
            _check_file_size(batch_bytes)
            parallel = {"prefetch_factor": prefetch,
                        "persistent_workers": True, "timeout": timeout, "worker_init_fn": init_worker}
        self._loader = QuietDataLoader(
            reader, sampler=self._requests, batch_size=None, collate_fn=unchanged, num_workers=workers,
            pin_memory=pin_memory and torch.cuda.is_available(),
            generator=torch.Generator(),  # else each epoch draws from the global one
            **parallel,
        )
        _loaders.add(self)

    def _begin(self, source: Iterator[ReadRequest]) -> Iterator[Batch]:
        """Let the workers begin with these requests at once; earlier ones are dropped."""
        self._iteration += 1
        self._requests.source = source
        starts = self.workers and self._loader._iterator is None
        with plain_worker_errors(), starting_workers() if starts else contextlib.nullcontext():
            return self._receive(self._iteration, iter(self._loader))

    def _receive(self, iteration: int, batches: Iterator[Any]) -> Iterator[Batch]:
        """Yield the batches of an iteration as the workers return them; raise the errors that they met."""
        while True:
            if iteration != self._iteration:
                raise RuntimeError("this iteration ended when a newer one of the same loader began")
            with plain_worker_errors():
                batch = next(batches, None)
            if batch is None:
                return
            if isinstance(batch, Failure):
                raise batch.error from (
                    RuntimeError(f"in a data worker:\n{batch.traceback}") if batch.traceback else None)
            self._note_damaged(batch)
            yield batch

    def _note_damaged(self, batch: Batch) -> None:
        """Count and log the recordings that couldn't be read or only in part; raise if too many couldn't."""
        self._failed += len(batch.damaged)
        self._read += len(batch.damaged) + int(batch.real.sum())
        for name, reason in batch.damaged:
            if name not in self.damaged and len(self.damaged) < LOGGED:
                logger.warning("left out: %s: %s", name, reason)
            self.damaged[name] = reason
        for name, what in batch.goes_on:
            if name not in self._warned_of and len(self._warned_of) < NAMED:
                logger.warning("%s: %s: only its beginning is read, although its text may be that of the whole "
                               "recording. Prepare the corpus again with check_audio: all, which measures every one",
                               name, what)
                self._warned_of.add(name)
        if self._failed > self.damaged_floor + self.max_damaged_share * self._read:
            first = "; ".join(f"{name}: {reason}" for name, reason in list(self.damaged.items())[:NAMED])
            raise SbkitError("too-much-damaged-audio", f"{self._failed} of the {self._read} recordings read so far are "
                             f"damaged or missing: {first}",
                             hint="repair them, or let preparation find them all (the corpus's check_audio: all); "
                                  "max_damaged_share is the share that a run tolerates")

    def state_dict(self) -> dict[str, Any]:
        """The number of recordings read so far and those that were damaged, for a checkpoint."""
        return {"read": self._read, "failed": self._failed, "damaged": dict(self.damaged)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting from a checkpoint's state."""
        self._read = state["read"]
        self._failed = state["failed"]
        self.damaged = dict(state["damaged"])

    def close(self) -> None:
        """End the worker processes; if the loader is used again, it starts new ones."""
        self._iteration += 1
        iterator: Any = self._loader._iterator  # torch's, of a private class
        self._loader._iterator = None
        if iterator is None or not self.workers:
            return
        _started.pop(iterator, None)
        iterator._shutdown_workers()
        for worker in iterator._workers:  # one that hangs while reading doesn't end by itself
            if worker.is_alive():
                worker.kill()

    def __enter__(self: _AnyLoader) -> _AnyLoader:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


class TrainLoader(_Loader):
    """Loads the micro-batches of a plan for one rank.

    manifest: the utterances, in the order of the plan's durations.
    tokenizer: encodes the texts, in the workers; ``None``: batches without tokens.
    plan: see ``sbkit.data.plan``.
    rank, world: which part of each step to read.
    augment: ``sbkit.data.augment.Augment`` or ``None``; seeded by (plan's seed, pass number, utterance).
    columns: further columns of a batch.
    nonspeech: ``sbkit.data.nonspeech.NonSpeech``, if it has added rows to the manifest.
    epochs: number of epochs of the run: after each but the last one, the workers begin to read the next, while the run
        validates; 0: it is unknown, so they wait for it.
    reading: ``workers`` (processes; 0: this one), ``pin_memory`` (read into page-locked memory, from which copies to a
        GPU overlap with computation; recordings of 16 bits stay so until they are there), ``prefetch`` (micro-batches
        that each worker reads ahead), ``timeout`` (seconds without a batch before the run ends; 0: never),
        ``max_damaged_share`` and ``damaged_floor`` (the run ends when more than this number, plus this share of those
        read, are damaged; until then they are left out and logged).

    >>> with TrainLoader(manifest, tokenizer, plan) as loader:  # doctest: +SKIP
    ...     for batch in loader.at(epoch=3, step=1200):
    ...         ...
    """

    def __init__(self, manifest: Manifest, tokenizer: SupportsEncode | None, plan: Plan, *, rank: int = 0,
                 world: int = 1, augment: Augment | None = None, columns: BatchColumns | None = None,
                 nonspeech: NonSpeech | None = None, sample_rate: int = SAMPLE_RATE, epochs: int = 0, **reading: Any):
        if len(plan.durations) != len(manifest):
            raise ValueError(f"a plan for {len(plan.durations)} utterances, a manifest of {len(manifest)}")
        if columns is not None:
            columns.check_classes(manifest)
        self.plan = plan
        self.rank = rank
        self.world = world
        self.epochs = epochs
        self._begun: tuple[int, Iterator[Batch]] | None = None
        """The epoch that the workers have begun to read ahead of time, and its batches."""
        self._latest_plan: tuple[int, EpochPlan] | None = None
        """The epoch that was asked for last, and its plan."""
        max_seconds = plan.batching.max_batch_seconds
        reader = Reader(manifest, tokenizer, augment=augment, columns=columns, seed=plan.batching.seed,
                        sample_rate=sample_rate, round_to=round(plan.round_seconds * sample_rate),
                        max_samples=int(max_seconds * sample_rate),
                        least=plan.batching.min_batch_utterances, nonspeech=nonspeech,
                        as_stored=reading.get("pin_memory", False))
        super().__init__(reader, max_seconds, **reading)

    def steps(self, epoch: int = 1) -> int:
        """The number of optimizer steps of an epoch, equal on all ranks."""
        return len(self.plan)

    def at(self, epoch: int, step: int = 0) -> Iterator[Batch]:
        """This rank's micro-batches of an epoch from step ``step`` on; earlier steps are not read."""
        if not 0 <= step <= self.steps(epoch):
            raise SbkitError("corpus-changed", f"epoch {epoch} has {self.steps(epoch)} steps; it cannot start at step "
                             f"{step}", hint="was the run started with another corpus or other batching options?")
        begun = self._begun
        self._begun = None
        batches = None
        if begun is not None and begun[0] == epoch and step == 0:
            batches = begun[1]
        return self._epoch_from(epoch, step, batches)

    def _epoch_from(self, epoch: int, step: int, batches: Iterator[Batch] | None) -> Iterator[Batch]:
        if batches is None:
            batches = self._begin(self._requests_from(epoch, step))
        yield from batches
        # The workers read on while the run validates.
        if self.workers and epoch < self.epochs:
            self._begun = (epoch + 1, self._begin(self._requests_from(epoch + 1, 0)))

    def to_device(self, batches: Iterator[Batch], device: torch.device | str) -> DevicePrefetcher:
        """The same batches on ``device``, each copied while the one before is computed."""
        return DevicePrefetcher(batches, device)

    def epoch_plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch; the most recent one is cached."""
        if self._latest_plan is None or self._latest_plan[0] != epoch:
            self._latest_plan = (epoch, self.plan.epoch(epoch))
        return self._latest_plan[1]

    def largest(self, epoch: int) -> list[Batch]:
        """Read the micro-batches of an epoch, of any rank, that may need the most memory."""
        plan = self.epoch_plan(epoch)
        manifest = self.reader.manifest
        text_lengths = np.fromiter(map(len, manifest.texts), np.int64, len(manifest))
        batches = []
        for places, shape in plan.largest(text_lengths, self.world):
            batch = self.reader[ReadRequest(epoch, 0, 0, 1, plan.members[places], plan.pass_numbers(places), shape)]
            if isinstance(batch, Batch):
                batches.append(batch)
        return batches

    def _requests_from(self, epoch: int, first_step: int) -> Iterator[ReadRequest]:
        plan = self.epoch_plan(epoch)
        for step in range(first_step, len(plan)):
            share = plan.micro_batches(step, self.rank, self.world)
            shape = plan.shape(step, self.world) if plan.padded else None
            for micro, places in enumerate(share):
                yield ReadRequest(epoch, step, micro, len(share), plan.members[places], plan.pass_numbers(places),
                                  shape)


class EvalLoader(_Loader):
    """Loads one rank's share of a manifest once, longest first; no utterance is seen by two ranks.

    Ranks may have different numbers of batches. An utterance longer than ``max_batch_seconds`` is a separate batch.
    ``augment`` changes an utterance in the same way each time. The other arguments are those of ``TrainLoader``.
    """

    def __init__(self, manifest: Manifest, tokenizer: SupportsEncode | None, *, max_batch_seconds: float,
                 max_batch_utterances: int | None = None, rank: int = 0, world: int = 1,
                 augment: Augment | None = None, columns: BatchColumns | None = None,
                 sample_rate: int = SAMPLE_RATE, **reading: Any):
        reader = Reader(manifest, tokenizer, augment=augment, columns=columns, sample_rate=sample_rate,
                        as_stored=reading.get("pin_memory", False))
        seconds = reader.columns.longest(manifest, planned_seconds(augment, manifest.durations))
        self.batches = eval_batches(seconds, max_batch_seconds, world, max_batch_utterances)[rank::world]
        super().__init__(reader, max(max_batch_seconds, float(seconds.max(initial=0.0))), **reading)

    def __len__(self) -> int:
        """The number of batches of this rank."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        yield from self._begin(ReadRequest(0, i, 0, 1, rows) for i, rows in enumerate(self.batches))


def eval_batches(durations: np.ndarray, max_batch_seconds: float, world: int = 1,
                 max_batch_utterances: int | None = None) -> list[np.ndarray]:
    """Row numbers of all utterances, longest first, in batches; rank ``r`` takes every ``world``-th from the ``r``-th.
    """
    order = np.argsort(-durations, kind="stable")
    seconds = durations[order].astype(np.float64).tolist()
    # Small sets get smaller batches, so that every rank has one.
    limit = min(max_batch_seconds, sum(seconds) / world * 1.1) * (1 + 1e-6)
    batches = []
    start = 0
    while start < len(seconds):
        fits = max(1, int(limit / max(seconds[start], 1e-3)))
        stop = start + min(fits, max_batch_utterances or fits)
        batches.append(order[start:stop])
        start = stop
    return batches


def _check_file_size(batch_bytes: int) -> None:
    """Raise if a worker may not write a batch, which it passes on as a file in memory.

    Such files are in no folder: how large ``/dev/shm`` is, often 64 MB in a container, doesn't matter.
    """
    max_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if max_bytes != resource.RLIM_INFINITY and max_bytes < batch_bytes:
        raise SbkitError("ulimit-too-low", f"a data worker passes on batches of up to {batch_bytes / 1e6:.1f} MB as "
                         f"files in memory, but files may only have {max_bytes / 1e6:.1f} MB here (ulimit -f)",
                         hint="raise the limit (ulimit -f unlimited), or read without workers (num_workers: 0)")


def unchanged(batch: T) -> T:
    """Stands for torch's ``default_convert``, which would copy what workers return."""
    return batch


_loaders: weakref.WeakSet[_Loader] = weakref.WeakSet()
_started: weakref.WeakKeyDictionary[Any, Reader] = weakref.WeakKeyDictionary()


@atexit.register
def _close_all() -> None:
    """Close all loaders at exit, before torch and multiprocessing would wait for the workers' SIGTERM."""
    for loader in list(_loaders):
        if loader._pid == os.getpid():  # a forked process leaves its parent's workers alone
            loader.close()


@contextlib.contextmanager
def plain_worker_errors() -> Iterator[None]:
    """Replace torch's errors about workers that died or hang with errors that say what to do."""
    try:
        yield
    except SbkitError:  # some are RuntimeErrors too
        raise
    except RuntimeError as error:
        text = str(error)
        if "timed out" in text:
            raise SbkitError("worker-hangs", "no batch arrived for a long time: the data workers hang",
                             hint="is the file system that holds the corpus reachable?") from error
        if "shared memory" in text or "Bus error" in text or "No space left" in text:
            raise SbkitError("shared-memory-full", "the data workers ran out of shared memory (/dev/shm)",
                             hint="give the container more (docker run --shm-size=8g), or use fewer workers") from error
        if "ancdata" in text or "Too many open files" in text:
            raise SbkitError("ulimit-too-low", "too many open files: no more batches can be received from a data "
                             "worker", hint="raise the limit (ulimit -n 65536), or keep fewer batches") from error
        if "DataLoader worker" in text:
            died, hint = _dead_worker() or (first_line(error), _NO_MEMORY)
            raise SbkitError("worker-died", f"a data worker died: {died}", hint=hint) from error
        raise


_NO_MEMORY = "the system does this when memory runs out (dmesg says so): try fewer workers (num_workers)"


def _dead_worker() -> tuple[str, str] | None:
    """Describe which worker died, why, and at which recording; with a hint."""
    for iterator, reader in list(_started.items()):
        for number, worker in enumerate(iterator._workers):
            if not worker.exitcode:
                continue
            killed = -worker.exitcode if worker.exitcode < 0 else None
            cause = f"was killed by {ended_by(killed)}" if killed else f"ended with code {worker.exitcode}"
            row = int(reader.reading[number])
            last = "it had not read any recording"
            if row >= 0:
                last = f"it last read {reader.manifest.ids[row]} ({reader.manifest.wavs[row]})"
            hint = _NO_MEMORY if killed == signal.SIGKILL else "if that happens again, leave that recording out"
            return f"number {number} of {len(iterator._workers)} (process {worker.pid}) {cause}; {last}", hint
    return None
