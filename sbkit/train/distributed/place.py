"""Which process of a run this is, as its launcher's environment says, and once it has joined, its process group."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from speechbrain.utils.distributed import ddp_prevent_block

Store = Any  # torch's stub of dist.Store lets set take no bytes


def launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return "RANK" in os.environ and "LOCAL_RANK" in os.environ


def connected() -> bool:
    """Return whether this process has joined a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the rank of this process."""
    if connected():
        return dist.get_rank()
    return int(os.environ["RANK"]) if launched() else 0


def world_size() -> int:
    """Return the number of ranks."""
    if connected():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if launched() else 1


def is_main() -> bool:
    """Return whether this is rank 0."""
    return rank() == 0


def is_alone() -> bool:
    """Return whether this process must not communicate: it is the only one, or only the main process is working."""
    return ddp_prevent_block() or world_size() == 1


def store() -> Store:
    """Return the store of the process group: a table of keys that every rank can read and write at any time."""
    return dist.distributed_c10d._get_default_store()
