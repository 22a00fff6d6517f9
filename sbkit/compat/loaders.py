"""Data loaders for ``fit`` and ``evaluate``: SpeechBrain's, or those of sbkit, which know about ranks."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import speechbrain as sb
import torch
from speechbrain.core import Stage
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataloader import LoopedLoader
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.dataio.sampler import DistributedSamplerWrapper
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

from sbkit.data.batch import PlannedBatch
from sbkit.data.reader import init_worker, starting_workers
from sbkit.errors import SbkitError
from sbkit.train import rng
from sbkit.train.batches import DataSource
from sbkit.train.distributed import ranks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

logger = logging.getLogger(__name__)
T = TypeVar("T")


def has_plan(loader: object) -> bool:
    """Return whether a loader begins at any step of an epoch, as ``sbkit.data.loader.TrainLoader`` does."""
    return hasattr(loader, "at") and hasattr(loader, "steps")


def is_share(loader: object) -> bool:
    """Return whether a loader yields only this rank's share (``sbkit.data.loader.EvalLoader``): it is no dataset."""
    return not isinstance(loader, (DataLoader, LoopedLoader, Dataset)) and (
        hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"))


@partial(register_checkpoint_hooks, save_on_main_only=False)
class LoaderCounts:
    """A recoverable for what a loader's ``state_dict`` counts on each rank, such as damaged recordings.

    With another number of ranks, numbers are divided evenly over ranks, and each rank gets all named entries.
    """

    def __init__(self, loader: Stateful):
        self.loader = loader

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        counts = ranks.gather_objects(self.loader.state_dict())
        if ranks.is_main():
            Path(path).write_text(json.dumps(counts), encoding="utf-8")

    @mark_as_loader
    def _load(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        del end_of_epoch
        counts = json.loads(Path(path).read_text(encoding="utf-8"))
        rank, world = ranks.rank(), ranks.world_size()
        part: dict[str, dict[str, Any] | int] = counts[rank] if len(counts) == world else {}
        for name in () if len(counts) == world else counts[0]:
            values = [each[name] for each in counts]
            part[name] = {key: value for each in values for key, value in each.items()} \
                if isinstance(values[0], dict) else sum(values) // world + (rank < sum(values) % world)
        self.loader.load_state_dict(part)


def set_epoch(epoch: int, *holders: Any) -> None:
    """Set the epoch of all samplers, including those in a ``batch_sampler``, which SpeechBrain leaves out."""
    found: list[Any] = [sampler for each in holders
                        for sampler in (each, getattr(each, "batch_sampler", None), getattr(each, "sampler", None))]
    for sampler in {id(sampler): sampler for sampler in found if hasattr(sampler, "set_epoch")}.values():
        sampler.set_epoch(epoch)


def length(loader: DataSource) -> int | None:
    """Return the number of batches; None if unknown (an IterableDataset)."""
    try:
        return len(loader)
    except TypeError:
        return None


def first_batch(loader: object, step: int) -> int:
    """Return the batch that a loader starts with when ``step`` batches of the epoch are done; 0 if it can't resume.

    SpeechBrain's loaders resume if they are among the checkpointer's recoverables, as those that a Brain makes are.
    """
    if isinstance(loader, LoopedLoader):
        first = loader.step
    else:
        first = getattr(loader, "_speechbrain_recovery_skip_to", None) or 0
    if step and not first and ranks.is_main():
        logger.warning("This data loader can't resume in the middle of an epoch, so it starts with its first batch. "
                       "Give fit the dataset, or a SaveableDataLoader that is among the checkpointer's recoverables")
    elif step and ranks.is_main():
        logger.info("Continuing after the first %d batches of the epoch", step)
    return first


def on_device(batches: Iterable[Any], loader: object, device: str) -> Iterable[Any]:
    """Return the batches on the device, copied in advance if the loader can do that."""
    if hasattr(loader, "to_device"):
        return loader.to_device(batches, device)
    return (batch.to(device) if hasattr(batch, "to") else batch for batch in batches)


def check_planned(batch: T) -> T:
    """Return a batch of a plan; refuse one that only looks as if it said where its step ends."""
    if hasattr(batch, "last") and not isinstance(batch, PlannedBatch):
        raise SbkitError(f"{type(batch).__name__}.last doesn't say where an optimizer step ends: it may be a key of a "
                         "recipe", hint="derive the class of a plan's batches from sbkit.data.batch.PlannedBatch")
    return batch


def resolve_loader(brain: sb.Brain, dataset: DataSource, stage: Stage, kwargs: dict[str, Any]) -> DataSource:
    """Return the loader for a stage: the given one, or one for the given dataset."""
    planned = stage is Stage.TRAIN and has_plan(dataset)
    if planned and brain.checkpointer is not None and hasattr(dataset, "load_state_dict"):
        brain.checkpointer.add_recoverable("loader", LoaderCounts(dataset), optional_load=True)
    if dataset is None or planned:
        return dataset
    if not (isinstance(dataset, (DataLoader, LoopedLoader)) or is_share(dataset)):
        if stage is not Stage.TRAIN and brain.shares_validation and ranks.world_size() > 1:
            if isinstance(dataset, IterableDataset):
                raise SbkitError("an IterableDataset can't be split over ranks, but each rank evaluates only its share",
                                 hint="give fit and evaluate an iterable that is not a Dataset and yields this rank's "
                                      "share; a script can also remove share_validation")
            kwargs = dict(kwargs)
            if isinstance(dataset, DynamicItemDataset):
                kwargs.setdefault("collate_fn", PaddedBatch)
            which = "batch_sampler" if kwargs.get("batch_sampler") is not None else "sampler"
            if kwargs.get(which) is None:
                kwargs[which] = SequentialSampler(dataset)
                kwargs.pop("shuffle", None)
            kwargs[which] = ShareSampler(kwargs[which], ranks.rank(), ranks.world_size())
        dataset = brain.make_dataloader(dataset, stage=stage, **kwargs)
    ordinary = _with_workers(dataset)
    if ordinary is not None and getattr(ordinary.worker_init_fn, "func", None) is not _start_worker:
        ordinary.worker_init_fn = partial(_start_worker, ordinary.worker_init_fn)
    for sampler in (getattr(dataset, "batch_sampler", None), getattr(dataset, "sampler", None)):
        name = {DistributedSamplerWrapper: "sampler", ShareSampler: "whole"}.get(type(sampler))
        if ranks.world_size() > 1 and name and not isinstance(getattr(sampler, name), SameOrderSampler):
            setattr(sampler, name, SameOrderSampler(getattr(sampler, name), int(brain.keys.seed or 0), brain.device))
    return dataset


def _with_workers(loader: object) -> DataLoader[Any] | None:
    """Return torch's loader if this is one, or a LoopedLoader of one, that reads in worker processes."""
    inner = getattr(loader, "loader", loader)
    return inner if isinstance(inner, DataLoader) and inner.num_workers else None


def _start_worker(given: Callable[[int], None] | None, worker: int) -> None:
    """Let a worker survive signals to the process group, as the run does; then call the recipe's ``worker_init_fn``."""
    init_worker(worker)
    if given is not None:
        given(worker)


def iterator_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Return the iterator of a loader; signals don't end its workers while they start."""
    ordinary = _with_workers(loader)
    if ordinary is None:
        return iter(loader)
    with starting_workers():
        iterator = iter(loader)
    with contextlib.suppress(TypeError):  # a recipe's own iterator may be of a kind that can't be kept
        _iterators[iterator] = ordinary
    return iterator


_iterators: weakref.WeakKeyDictionary[Any, DataLoader[Any]] = weakref.WeakKeyDictionary()  # by torch's own iterators
os.register_at_fork(after_in_child=_iterators.clear)  # their workers are the parent's


@atexit.register
def _end_workers() -> None:
    """End the workers of ordinary loaders, which ignore SIGTERM, before multiprocessing would wait for them."""
    for iterator, loader in list(_iterators.items()):
        for each in (getattr(iterator, "iterator", iterator), loader._iterator):
            if each is not None and hasattr(each, "_shutdown_workers"):
                each._shutdown_workers()


class SameOrderSampler(Sampler[Any]):
    """Another sampler with the same order on all ranks, independent of their random number generators."""

    def __init__(self, whole: Any, seed: int, device: torch.device | str):  # torch's Sampler has no length
        self.whole, self.seed, self.device, self.epoch = whole, seed, device, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch, also in the sampler."""
        self.epoch = int(epoch)
        set_epoch(epoch, self.whole)

    def __iter__(self) -> Iterator[Any]:
        with rng.seeded(self.seed, self.epoch, device=self.device):
            return iter(list(self.whole))

    def __len__(self) -> int:
        return len(self.whole)


class ShareSampler(Sampler[Any]):
    """Every ``world``-th element of another sampler, without repeating any to make shares equal."""

    def __init__(self, whole: Any, rank: int, world: int):  # as above
        self.whole, self.rank, self.world = whole, rank, world

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.whole), self.rank, None, self.world)

    def __len__(self) -> int:
        return len(range(self.rank, len(self.whole), self.world))
