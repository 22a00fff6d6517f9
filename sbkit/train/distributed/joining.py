"""How the processes of a run find each other: what the launcher must have set, the backend, and a fresh store."""

from __future__ import annotations

import datetime
import logging
import os
import time
import uuid
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn  # once there is a group it is too late: its default arguments would hold that
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from sbkit.errors import SbkitError
from sbkit.train.distributed.place import Store

logger = logging.getLogger(__name__)

# Collectives only wait for ranks that do the same work, so a long wait means a dead rank.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
# Time after which those that are still missing are named.
SILENT_SECONDS = 60.0
_POLL_SECONDS = 0.1


def join(device: torch.device, backend: str | None) -> None:
    """Join the process group; see ``RunGroup.join``."""
    _refuse_incomplete_environment()
    backend = _backend_for(device, backend)
    store, rank, world = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _fresh_store(store, rank, world)
    dist.init_process_group(backend=backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)


def _refuse_incomplete_environment() -> None:
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise SbkitError("incomplete-environment", f"RANK and LOCAL_RANK are set, but not {', '.join(missing)}",
                         hint="start with torchrun, or set the same variables as torchrun")


def _backend_for(device: torch.device, requested: str | None) -> str | None:
    """Return the backend for ``init_process_group``."""
    if requested not in (None, "nccl", "gloo", "mpi"):
        raise SbkitError("bad-value", f"distributed_backend is {requested!r}", hint="choose nccl, gloo or mpi",
                         key="distributed_backend", value=requested)
    if requested in (None, "nccl"):
        if device.type == "cpu":
            return "gloo"
        if device.type == "cuda":
            return "cpu:gloo,cuda:nccl"
    return requested


# ------------------------------------------------------------ a store that nobody has written to


def _fresh_store(store: Store, rank: int, world: int) -> Store:
    """Return a part of torchrun's store that no earlier start of these ranks has written to.

    The store outlives a restart, with the addresses of ranks that are gone. Counts of restarts differ between machines,
    so rank 0 chooses a name for this start, and hands it to each rank under a token that only a process of this start
    can know:

    ===============================  ===========  =================================================
    key                              written by   what it holds
    ===============================  ===========  =================================================
    ``sbkit/start/RANK``             that rank    its token; after a restart a new one replaces it
    ``sbkit/name/TOKEN``             rank 0       the name, for the rank with this token
    ``NAME/named/RANK``              that rank    that it has read the name
    ===============================  ===========  =================================================
    """
    token = uuid.uuid4().hex
    store.set(f"sbkit/start/{rank}", token)
    if rank == 0:
        name = token
        _hand_out_name(store, name, world)
    else:
        name = _name_from_rank_0(store, token, rank)
    return PrefixStore(name, store)


def _name_from_rank_0(store: Store, token: str, rank: int) -> str:
    key = f"sbkit/name/{token}"
    _wait_for_ranks(lambda: [] if store.check([key]) else [0], describe=rank == 1)  # one warning is enough
    name: str = store.get(key).decode()
    store.set(f"{name}/named/{rank}", b"1")
    return name


def _hand_out_name(store: Store, name: str, world: int) -> None:
    """Give every other rank the name, until each has read it."""
    answered: set[bytes] = set()

    def ranks_without_name() -> list[int]:
        unnamed = [other for other in range(1, world) if not store.check([f"{name}/named/{other}"])]
        for other in unnamed:
            key = f"sbkit/start/{other}"
            if not store.check([key]):
                continue
            # It may be that of an earlier start: then a new one follows, and is answered as well.
            token = store.get(key)
            if token not in answered:
                answered.add(token)
                store.set(f"sbkit/name/{token.decode()}", name)
        return unnamed

    _wait_for_ranks(ranks_without_name, describe=True)


def _wait_for_ranks(missing: Callable[[], list[int]], describe: bool) -> None:
    """Wait until no rank is missing; after a minute, warn of those that are, if ``describe``."""
    began = time.monotonic()
    while absent := missing():
        waited = time.monotonic() - began
        who = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        if waited > COLLECTIVE_TIMEOUT.total_seconds():
            raise SbkitError("missing-rank", f"{who} didn't join the others in {waited:.0f} s",
                             hint="see their output; was one started on each machine?")
        if describe and waited > SILENT_SECONDS:
            logger.warning("Waiting for %s, which didn't join the others in %.0f s. Is it still starting, and can it "
                           "reach this machine?", who, waited)
            describe = False
        time.sleep(_POLL_SECONDS)
