"""How tensors are summed over ranks: by torch.distributed here, on one machine's CPU by ``shared_sums``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist


class PendingSum(Protocol):
    """A sum that has begun."""

    def wait(self) -> object:
        """Wait until the tensor holds the sum; on a GPU, only the stream waits."""


class Sums(Protocol):
    """Replaces tensors by their sums over ranks. All ranks must ask for the same sums in the same order."""

    def add(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum."""

    def start(self, tensor: torch.Tensor) -> PendingSum:
        """Begin to replace a tensor by its sum; until that is waited for, nobody may use the tensor."""


class TorchSums:
    """Sums by the collectives of torch.distributed: gloo on a CPU, NCCL on GPUs.

    cpu_group : returns the group for tensors on the CPU
    """

    def __init__(self, cpu_group: Callable[[], dist.ProcessGroup | None]):
        self._cpu_group = cpu_group

    def add(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self._group_of(tensor))

    def start(self, tensor: torch.Tensor) -> PendingSum:
        work = dist.all_reduce(tensor, group=self._group_of(tensor), async_op=True)
        assert work is not None
        return work

    def _group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        return self._cpu_group() if tensor.device.type == "cpu" else None
