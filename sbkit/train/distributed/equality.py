"""What keeps ranks equal besides the exchange of gradients: rank 0's buffers, and a comparison of all bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from sbkit.errors import SbkitError
from sbkit.train.distributed import ranks

#: Values whose products are in memory at once.
_HASHED_AT_ONCE = 1 << 20


class Buffers:
    """Keeps buffers that training changes (codebooks, running means) equal to those of rank 0."""

    def __init__(self, modules: nn.Module):
        self.modules = modules
        self.changing: list[str] = []
        """The names of those that have changed so far, on any rank."""
        self._seen = self._fingerprints() if ranks.world_size() > 1 else None

    def _fingerprints(self) -> dict[str, int]:
        return {name: int(fingerprint(buffer)) for name, buffer in self.modules.named_buffers()
                if not buffer.is_complex()}

    def detect_changes(self) -> None:
        """Find the buffers that changed on any rank, and take rank 0's values; all ranks call it after a step."""
        if self._seen is None:
            return
        now = self._fingerprints()
        changed = torch.tensor([now[name] != self._seen.get(name) for name in now], dtype=torch.int32)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=ranks.cpu_group())
        self.changing += [name for name, has_changed in zip(now, changed.tolist(), strict=True)
                          if has_changed and name not in self.changing]
        self._seen = now
        self.sync()

    def sync(self) -> None:
        """Take rank 0's values of the buffers that change."""
        if self.changing:
            buffers = dict(self.modules.named_buffers())
            ranks.take_from_main(buffers[name] for name in self.changing)


@torch.no_grad()
def assert_ranks_equal(modules: nn.Module, when: str) -> None:
    """Raise an error that names a parameter or buffer if it differs between ranks in any bit, or in their order.

    Each rank hashes each tensor on its device, and the hashes are exchanged once. Of a parameter that FSDP shards there
    is nothing to compare: each part of it is on one rank alone.
    """
    if ranks.world_size() == 1:
        return
    named = [*modules.named_parameters(), *modules.named_buffers()]
    named = [(name, tensor) for name, tensor in named if not hasattr(tensor, "full_tensor")]
    if not named:
        return
    hashes = torch.stack([fingerprint(tensor) for _, tensor in named])
    table = [torch.empty_like(hashes) for _ in range(ranks.world_size())]
    dist.all_gather(table, hashes)
    different = (torch.stack(table) != table[0]).cpu()
    if not different.any():
        return
    names = [named[i][0] for i in different.any(0).nonzero().flatten().tolist()]
    others = different.any(1).nonzero().flatten().tolist()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    ranks.raise_on_main(SbkitError(
        "ranks-differ",
        f"the ranks no longer train the same model: {when}, '{names[0]}'{more} of rank "
        f"{', '.join(map(str, others))} differs from rank 0",
        hint="is it changed outside of compute_forward and the optimizer, or initialised at random on each rank?",
        exit_code=1,
    ))


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of a tensor's bits and their places, an int64 scalar on its device; nothing waits for it.

    Each value's bits, as a whole number, are multiplied by a number that its place decides, and the products are
    summed modulo 2**64. That is exact, so the order of the sum, which devices choose as they like, doesn't matter.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # 8 bytes are two numbers: the highest bits of two numbers of 64 would cancel out.
    numbers = tensor.reshape(-1).view({1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    of_place = _place_factors(0, min(len(numbers), _HASHED_AT_ONCE), tensor.device)
    for block, part in enumerate(numbers.split(_HASHED_AT_ONCE)):
        of_block = _place_factors(_HASHED_AT_ONCE + block, 1, tensor.device)
        total += (part.to(torch.int64) * of_place[: len(part)]).sum() * of_block[0]
    return total


def _place_factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return an odd number of 64 bits for each of these places, as SplitMix64 mixes them."""
    mixed = (torch.arange(first, first + count, device=device) + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)) | 1
