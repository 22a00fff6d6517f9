"""What ranks do together at the same point: one works for all, they meet, and they exchange objects and sums.

Each of these does nothing, or only its own part, in a process that is alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from speechbrain.utils.distributed import MainProcessContext

from sbkit.train.distributed import place
from sbkit.train.distributed.run_group import group
from sbkit.train.distributed.sums import PendingSum

T = TypeVar("T")


def run_on_main(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run ``fn`` on rank 0 and return its result, which must be picklable, on every rank.

    The others wait without a time limit. If it raises, rank 0 raises, and the others end within seconds without a
    message.
    """
    if place.is_alone():
        return fn(*args, **kwargs)
    key = group.new_key("run_on_main")
    answer = [b""]
    if place.is_main():
        try:
            with MainProcessContext():  # otherwise SpeechBrain's barriers in fn would wait for the others
                result = fn(*args, **kwargs)
            answer = [pickle.dumps(result)]
        except BaseException as error:
            group.failures.announce(error)
            raise
        place.store().set(key, b"done")
    group.wait_for(key)
    dist.broadcast_object_list(answer, src=0, group=group.cpu_group())  # all are here, so it does not wait
    return result if place.is_main() else pickle.loads(answer[0])


def barrier(name: str = "meet", patience: float | None = None) -> bool:
    """Wait until every rank is here, at most ``patience`` seconds; end if one of them fails. Return whether all are."""
    return place.is_alone() or group.meet(name, patience)


def gather_objects(obj: T) -> list[T]:
    """Return the objects of all ranks, in the order of ranks, on every rank."""
    if place.is_alone():
        return [obj]
    barrier("gather")
    objects: list[Any] = [None] * place.world_size()
    dist.all_gather_object(objects, obj, group=group.cpu_group())
    return objects


def sum_across(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over ranks; the given tensor does not change."""
    if place.is_alone():
        return tensor
    summed = tensor.clone()
    sum_in_place(summed)
    return summed


def sum_in_place(tensor: torch.Tensor) -> None:
    """Replace a tensor by its sum over ranks."""
    if not place.is_alone():
        group.sums.add(tensor)


def start_sum(tensor: torch.Tensor) -> PendingSum:
    """Begin to replace a tensor by its sum over all ranks; until that is waited for, nobody may use the tensor."""
    return group.sums.start(tensor)


@torch.no_grad()
def take_from_main(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite tensors with rank 0's values."""
    if place.world_size() == 1:
        return
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


def any_of(flags: dict[str, bool]) -> dict[str, bool]:
    """Return each flag as true if it is true on any rank."""
    raised = sum_across(torch.tensor([int(value) for value in flags.values()], dtype=torch.int32))
    return {name: bool(count) for name, count in zip(flags, raised.tolist(), strict=True)}
