"""Data loaders for ``fit`` and ``evaluate``: SpeechBrain's, or those of sbkit, which know about ranks.

A loader is of one of four kinds: one with a plan (``has_plan``), one that yields this rank's share (``is_share``),
torch's or SpeechBrain's own, and a dataset, for which a Brain makes one (``resolve_loader``).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import speechbrain as sb
from speechbrain.core import Stage
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataloader import LoopedLoader
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from sbkit.compat import workers
from sbkit.compat.samplers import ShareSampler, give_same_order
from sbkit.data.batch import PlannedBatch
from sbkit.errors import SbkitError
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
        raise SbkitError("batch-without-plan",
                         f"a {type(batch).__name__} has a field 'last', but is not a batch of a plan, whose field says "
                         "where an optimizer step ends",
                         hint="derive the class of a plan's batches from sbkit.data.batch.PlannedBatch")
    return batch


def resolve_loader(brain: sb.Brain, dataset: DataSource, stage: Stage, kwargs: dict[str, Any]) -> DataSource:
    """Return the loader for a stage: the given one, or one for the given dataset.

    kwargs : the arguments that ``fit`` or ``evaluate`` got for torch's loader
    """
    if dataset is None:
        return None
    if stage is Stage.TRAIN and has_plan(dataset):
        if brain.checkpointer is not None and hasattr(dataset, "load_state_dict"):
            brain.checkpointer.add_recoverable("loader", LoaderCounts(dataset), optional_load=True)
        return dataset

    loader = dataset
    if not isinstance(dataset, (DataLoader, LoopedLoader)) and not is_share(dataset):
        if stage is not Stage.TRAIN and brain.shares_validation and ranks.world_size() > 1:
            kwargs = _of_share(dataset, kwargs)
        loader = brain.make_dataloader(dataset, stage=stage, **kwargs)
    workers.survive_signals(loader)
    give_same_order(loader, int(brain.keys.seed or 0), brain.device)
    return loader


def _of_share(dataset: DataSource, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for a loader that reads only this rank's share of a dataset."""
    if isinstance(dataset, IterableDataset):
        raise SbkitError("unsplittable-dataset",
                         "an IterableDataset can't be split over ranks, but each rank evaluates only its share",
                         hint="give fit and evaluate an iterable that is not a Dataset and yields this rank's "
                              "share; a script can also remove share_validation")
    kwargs = dict(kwargs)
    if isinstance(dataset, DynamicItemDataset):
        kwargs.setdefault("collate_fn", PaddedBatch)
    divided = "batch_sampler" if kwargs.get("batch_sampler") is not None else "sampler"
    if kwargs.get(divided) is None:
        kwargs[divided] = SequentialSampler(dataset)
        kwargs.pop("shuffle", None)
    kwargs[divided] = ShareSampler(kwargs[divided], ranks.rank(), ranks.world_size())
    return kwargs


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
        counts_of_ranks = json.loads(Path(path).read_text(encoding="utf-8"))
        rank, world = ranks.rank(), ranks.world_size()
        if len(counts_of_ranks) == world:
            self.loader.load_state_dict(counts_of_ranks[rank])
            return

        counts: dict[str, dict[str, Any] | int] = {}
        for name in counts_of_ranks[0]:
            values = [counts_of_rank[name] for counts_of_rank in counts_of_ranks]
            if isinstance(values[0], dict):
                counts[name] = {key: value for named in values for key, value in named.items()}
            else:
                counts[name] = sum(values) // world + (rank < sum(values) % world)
        self.loader.load_state_dict(counts)
