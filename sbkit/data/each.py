"""A function of each utterance of a manifest, computed in several processes; results come in the manifest's order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from sbkit.data.audio import AudioError
from sbkit.data.loader import Workers, plain_errors
from sbkit.data.manifest import Manifest
from sbkit.data.reader import Reader, quiet_worker, starting_workers
from sbkit.system.cores import usable_cores

#: For fewer utterances, starting processes takes longer than what they compute.
WORTH_PROCESSES = 500
_MAX_WORKERS = 32
_AHEAD = 16  # results that each process computes ahead

T = TypeVar("T")


class Unread(NamedTuple):
    """Takes the place of a result where a recording can't be read."""

    id: str
    why: str


class _Results(Dataset[Any], Generic[T]):
    """The results by number of the utterance, in a worker process."""

    def __init__(self, function: Callable[[np.ndarray], T], manifest: Manifest, sample_rate: int):
        self.function, self.reader = function, Reader(manifest, None, sample_rate=sample_rate)

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, row: int) -> T | Unread:
        name = self.reader.manifest.ids[row]
        try:
            signal = self.reader.signals(row, name, pass_number=0)[0]
        except AudioError as error:
            return Unread(name, str(error))
        return self.function(signal)


def over_utterances(function: Callable[[np.ndarray], T], manifest: Manifest, sample_rate: int,
                    workers: int | None = None) -> Iterator[T | Unread]:
    """Yield ``function(signal)`` for each utterance's waveform [S], always computed by one thread.

    workers : number of processes; None: one for each core if they are worth starting; 0: this one computes
    """
    if workers is None:
        cores = min(_MAX_WORKERS, usable_cores())
        workers = cores if cores > 1 and len(manifest) >= WORTH_PROCESSES else 0
    parallel: dict[str, Any] = {"worker_init_fn": quiet_worker, "prefetch_factor": _AHEAD} if workers else {}
    loader = Workers(_Results(function, manifest, sample_rate), batch_size=None, collate_fn=_unchanged,
                     num_workers=workers, generator=torch.Generator(), **parallel)
    with _one_thread(), starting_workers() if workers else contextlib.nullcontext(), plain_errors():
        results: Any = iter(loader)  # of a class that torch keeps to itself
    try:
        while True:
            with _one_thread(), plain_errors():
                result = next(results, _END)
            if result is _END:
                return
            yield result
    finally:
        if workers:
            results._shutdown_workers()


_END: Any = object()  # so that what is told from it keeps its type


def _unchanged(result: T) -> T:
    return result


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in several threads depend on their number, and workers have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
