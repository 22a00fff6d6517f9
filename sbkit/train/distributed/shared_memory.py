"""Memory that all ranks map, if they are on one machine and see each other's processes.

It is anonymous (``memfd_create``): it has no name in /dev/shm, whose size does not limit it, and it is gone with the
last process that maps it, however that ends. Rank 0 makes it, and the others open it by the number of rank 0's process,
so they must have the same namespace of process numbers. A random token in its name proves that it is the same memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar, cast

import torch.distributed as dist

from sbkit.system import processes
from sbkit.system.compiled import Unavailable

T = TypeVar("T")


class _Offer(NamedTuple):
    """What a rank tells the others of itself, and rank 0 of the memory that it made."""

    obstacle: str | None  # why this rank can't share memory
    process: int
    machine: str
    namespace: str  # of process numbers
    descriptor: int
    token: str


def share_memory(size: int, obstacle: str | None) -> tuple[mmap.mmap, list[int]]:
    """Return memory of ``size`` bytes that all ranks map, zeros, and the numbers of their processes.

    All ranks must call it together. It raises :class:`Unavailable` on all of them if it is impossible for one.

    obstacle : why this rank can't use it, if it can't
    """
    token = uuid.uuid4().hex
    with contextlib.ExitStack() as opened:
        descriptor = -1
        if obstacle is None and dist.get_rank() == 0:
            try:
                descriptor = opened.enter_context(_memory(token, size))
            except (OSError, AttributeError) as error:  # no such call on this system, or too little memory
                obstacle = f"rank 0 can't make memory to share ({error})"
        offer = _Offer(obstacle, os.getpid(), processes.machine(), processes.namespace(), descriptor, token)
        offers = _gathered(offer)
        _raise_first(offer.obstacle for offer in offers)

        memory = obstacle = None
        try:
            memory = _mapped(offers[0], offer, size)
        except (OSError, Unavailable) as error:
            obstacle = f"rank {dist.get_rank()} can't open rank 0's memory ({error})"
        _raise_first(_gathered(obstacle))  # after it, rank 0 may close its descriptor
    assert memory is not None
    return memory, [offer.process for offer in offers]


@contextlib.contextmanager
def _memory(token: str, size: int) -> Iterator[int]:
    """Make the memory, and keep it open by a descriptor."""
    descriptor = os.memfd_create(_name(token))
    try:
        os.posix_fallocate(descriptor, 0, size)  # an error now, rather than the end of a process later
        yield descriptor
    finally:
        os.close(descriptor)


def _name(token: str) -> str:
    return f"sbkit-{token}"


def _mapped(main: _Offer, own: _Offer, size: int) -> mmap.mmap:
    """Map the memory of rank 0."""
    if (main.machine, main.namespace) != (own.machine, own.namespace):
        raise Unavailable("it is on another machine or in another container")
    path = f"/proc/{main.process}/fd/{main.descriptor}"
    target = os.readlink(path)  # before it is opened: it could be anything of another process
    if target != f"/memfd:{_name(main.token)} (deleted)":
        raise Unavailable(f"{path} is {target}")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _gathered(value: T) -> list[T]:
    """Return the values of all ranks, in the order of ranks."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def _raise_first(obstacles: Iterable[str | None]) -> None:
    """Raise the first obstacle of any rank, on each rank that has them all."""
    for obstacle in obstacles:
        if obstacle is not None:
            raise Unavailable(obstacle)
