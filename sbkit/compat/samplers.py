"""Samplers of SpeechBrain's loaders on several ranks: the same order on all of them, and each rank's share of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from speechbrain.dataio.sampler import DistributedSamplerWrapper
from torch.utils.data import Sampler

from sbkit.train import rng
from sbkit.train.distributed import ranks

Loader = Any  # torch's DataLoader, or another with samplers under the same names
Whole = Any  # a sampler of all ranks' elements: torch's base class has no length


def set_epoch(epoch: int, *holders: Loader) -> None:
    """Set the epoch of all samplers, including those in a ``batch_sampler``, which SpeechBrain leaves out."""
    samplers: dict[int, Any] = {}  # by id, since one may be in two places
    for holder in holders:
        for sampler in (holder, getattr(holder, "batch_sampler", None), getattr(holder, "sampler", None)):
            if hasattr(sampler, "set_epoch"):
                samplers[id(sampler)] = sampler
    for sampler in samplers.values():
        sampler.set_epoch(epoch)


def give_same_order(loader: Loader, seed: int, device: torch.device | str) -> None:
    """Have the samplers that divide a loader's elements among ranks draw the same order on all of them.

    Otherwise the shares overlap, since each rank has random numbers of its own.
    """
    if ranks.world_size() == 1:
        return
    for divider in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        # Where these two keep the sampler that they divide; others divide nothing.
        attribute = {DistributedSamplerWrapper: "sampler", ShareSampler: "whole"}.get(type(divider))
        if attribute is None:
            continue
        whole = getattr(divider, attribute)
        if not isinstance(whole, SameOrderSampler):
            setattr(divider, attribute, SameOrderSampler(whole, seed, device))


class SameOrderSampler(Sampler[Any]):
    """Another sampler with the same order on all ranks, independent of their random number generators."""

    def __init__(self, whole: Whole, seed: int, device: torch.device | str):
        self.whole = whole
        self.seed = seed
        self.device = device
        self.epoch = 0

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

    def __init__(self, whole: Whole, rank: int, world: int):
        self.whole = whole
        self.rank = rank
        self.world = world

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.whole), self.rank, None, self.world)

    def __len__(self) -> int:
        return len(range(self.rank, len(self.whole), self.world))
