"""What keeps ranks equal besides the exchange of gradients: buffers, statistics of batches, a comparison of bits."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from speechbrain.processing.features import InputNormalization
from torch import nn

from sbkit.errors import SbkitError
from sbkit.nn import sync_batch_norm
from sbkit.nn.fast.front_end import FixedNormalization
from sbkit.recipe.parts import ParameterGroups
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def zeroed(modules: nn.Module) -> Iterator[None]:
    """Set all gradients of backwards inside this context to 0, NaN included: those of a stand-in batch."""
    handles = [p.register_hook(torch.zeros_like) for p in modules.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Buffers:
    """Keeps buffers that training changes (codebooks, running means) equal to those of rank 0."""

    def __init__(self, modules: nn.Module):
        self.modules = modules
        self.changing: list[str] = []
        """The names of those that have changed so far, on any rank."""
        self._seen = self._sums() if ranks.world_size() > 1 else None

    def _sums(self) -> dict[str, float]:  # whole numbers
        return {name: _bits(buffer).sum(dtype=torch.int64).item() for name, buffer in self.modules.named_buffers()
                if not buffer.is_complex()}

    def detect_changes(self) -> None:
        """Find the buffers that changed on any rank, and take rank 0's values; all ranks call it after a step."""
        if self._seen is None:
            return
        now = self._sums()
        changed = torch.tensor([now[name] != self._seen.get(name) for name in now], dtype=torch.int32)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=ranks.cpu_group())
        self.changing += [name for name, did in zip(now, changed.tolist(), strict=True)
                          if did and name not in self.changing]
        self._seen = now
        self.sync()

    def sync(self) -> None:
        """Take rank 0's values of the buffers that change."""
        if self.changing:
            buffers = dict(self.modules.named_buffers())
            ranks.take_from_main(buffers[name] for name in self.changing)


@torch.no_grad()
def assert_ranks_equal(modules: nn.Module, when: str) -> None:
    """Raise an error that names a parameter or buffer if it differs between ranks in any bit.

    Each rank sums the bits of each tensor on its device, and the sums are exchanged once.
    """
    if ranks.world_size() == 1:
        return
    named = [*modules.named_parameters(), *modules.named_buffers()]
    named = [(name, tensor) for name, tensor in named if not hasattr(tensor, "full_tensor")]
    if not named:
        return
    sums = torch.stack([_bits(tensor).sum(dtype=torch.int64) for _, tensor in named])
    table = [torch.empty_like(sums) for _ in range(ranks.world_size())]
    dist.all_gather(table, sums)
    different = (torch.stack(table) != table[0]).cpu()
    if not different.any():
        return
    names = [named[i][0] for i in different.any(0).nonzero().flatten().tolist()]
    others = different.any(1).nonzero().flatten().tolist()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    ranks.raise_on_main(SbkitError(
        f"the ranks no longer train the same model: {when}, '{names[0]}'{more} of rank "
        f"{', '.join(map(str, others))} differs from rank 0",
        hint="is it changed outside of compute_forward and the optimizer, or initialised at random on each rank?",
        exit_code=1,
    ))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    same_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(same_size)


def warn_unreached(modules: nn.Module, recipe: Mapping[str, Any], warned: set[str]) -> None:
    """Warn of parameters without a gradient after the first backward, with their names in the recipe.

    warned : the parameters of earlier warnings, which are not named again; updated here
    """
    unreached = {name for name, p in modules.named_parameters() if p.requires_grad and p.grad is None}
    missing = unreached - warned
    if missing and ranks.is_main():
        whole: list[str] = []  # modules that the loss does not reach at all are named as such
        for name, module in modules.named_modules():  # parents come before their children
            inside = {f"{name}.{n}" for n, p in module.named_parameters() if p.requires_grad} - warned
            if name and inside and inside <= missing and not any(name.startswith(f"{each}.") for each in whole):
                whole.append(name)
        covered = tuple(f"{name}." for name in whole)
        names = sorted([*whole, *(name for name in missing if not name.startswith(covered))])
        parts = ParameterGroups(modules, recipe)
        logger.warning("The loss does not reach these parameters, so they are not trained (expected for a part that "
                       "the recipe does not use, such as a decoder): %s",
                       ", ".join(map(parts.name, names)).replace("_orig_mod.", ""))
    warned |= unreached


def communicates_in_forward(module: nn.Module) -> bool:
    """Return whether a layer communicates between ranks in its forward, so that all ranks must call it together."""
    if isinstance(module, InputNormalization):
        return module.norm_type == "global" and not isinstance(module, FixedNormalization)
    return isinstance(module, (nn.SyncBatchNorm, sync_batch_norm.SyncBatchNorm))
