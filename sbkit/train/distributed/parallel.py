"""The one wrap: gradients are averaged over ranks however a recipe reaches a layer, and ranks stay equal.

``Brain`` runs forward and loss inside one ``Shell`` that owns all its modules. With several processes DDP
wraps that shell (see ``ddp``), and nothing else, so ``self.modules.x`` stays the module it was. A recipe with a
``fit_batch`` of its own calls layers and ``backward`` as it likes (a GAN, two optimizers): there the
parameters themselves report their gradients, which are averaged at the end of each backward.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from speechbrain.processing.features import InputNormalization
from torch import nn

from sbkit.errors import SbkitError
from sbkit.recipe.parts import Parts
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

# What one all-reduce of the fallback carries at most.
_BUCKET_BYTES = 64 << 20


class Shell(nn.Module):
    """All modules of a Brain as one; its forward is forward plus loss of one batch.

    Arguments
    ---------
    modules: ``brain.modules``
    run: batch -> scalar tensor to call ``backward`` on
    """

    _ddp_params_and_buffers_to_ignore: list[str]  # DDP looks for it

    def __init__(self, modules: nn.ModuleDict, run: Callable[[Any], torch.Tensor]):
        super().__init__()
        self.owned = modules
        self.forward = run


class Alone:
    """One process: nothing to synchronise."""

    world = 1
    #: Whether gradients may be averaged after a backward as well as during it.
    can_wait = False
    #: Whether each backward looks for what it does not reach.
    searches = False
    #: Parameters, by name, that were reached at first and then were not, or the other way round.
    changed: frozenset[str] | set[str] = frozenset()

    def __init__(self, shell: Shell):
        self.shell = shell

    @property
    def module(self) -> nn.Module:
        """What gives the loss of a batch when it is called."""
        return self.shell

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """Within it, backward only accumulates."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Average what was accumulated under ``no_sync`` and never followed by a backward outside it."""

    def complete(self, loss: torch.Tensor) -> None:
        """After ``loss.backward()``: see to it that gradients of what it did not reach go round too."""

    def note_unreached(self) -> None:
        """Before the update: take a look at what the first step did not reach."""

    def settle(self) -> None:
        """After the update: go by what ``note_unreached`` saw."""

    def search(self) -> None:
        """From here on look in each backward for what it does not reach."""

    def renew(self) -> None:
        """Other parameters train from here on: begin as with the first step; called by all ranks between two."""

    def gathered(self) -> contextlib.AbstractContextManager[object]:
        """Within it each rank can evaluate on its own."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Take the wrap off; a new ``fit`` makes a new one."""


class Hooked(Alone):
    """Each parameter reports when its gradient is there; at the end of a backward they are averaged."""

    def __init__(self, shell: Shell):
        super().__init__(shell)
        self.world = ranks.world_size()
        self._sync = True
        self._handles: list[Any] = []
        self.renew()
        with torch.no_grad():
            for tensor in [*shell.parameters(), *shell.buffers()]:
                dist.broadcast(tensor.detach(), src=0)

    def renew(self) -> None:
        self.close()
        self._parameters = [p for p in self.shell.parameters() if p.requires_grad]
        self._reached: set[int] = set()
        self._queued = False
        self._handles = [parameter.register_post_accumulate_grad_hook(functools.partial(self._note, i))
                         for i, parameter in enumerate(self._parameters)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, i: int, parameter: torch.Tensor) -> None:
        self._reached.add(i)
        if self._sync and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> None:
        reached, self._reached, self._queued = self._reached, set(), False
        average_gradients(self._parameters, reached)


def average_gradients(parameters: Sequence[nn.Parameter], reached: Iterable[int] | None = None) -> None:
    """Replace gradients by their mean over ranks; what no rank reached keeps ``grad`` None.

    reached: positions of the parameters that this rank has new gradients for (default: all that have one)
    """
    mask = torch.zeros(len(parameters), dtype=torch.int32)
    for i in range(len(parameters)) if reached is None else reached:
        mask[i] = int(parameters[i].grad is not None)
    dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=ranks.cpu_group())
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for i in mask.nonzero().flatten().tolist():
        parameter = parameters[i]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket = buckets.setdefault((parameter.grad.dtype, parameter.grad.device), [])
        bucket.append(parameter.grad)
        if sum(g.numel() * g.element_size() for g in bucket) >= _BUCKET_BYTES:
            _average(bucket)
            bucket.clear()
    for bucket in buckets.values():
        _average(bucket)


def _average(grads: list[torch.Tensor]) -> None:
    if not grads:
        return
    flat = torch.cat([g.detach().reshape(-1) for g in grads])
    dist.all_reduce(flat)
    flat /= ranks.world_size()
    pieces = flat.split([g.numel() for g in grads])
    torch._foreach_copy_([g.detach() for g in grads],
                         [piece.view_as(g) for piece, g in zip(pieces, grads, strict=True)])


@contextlib.contextmanager
def zeroed_if(standing_in: bool, modules: nn.Module) -> Iterator[None]:
    """For a stand-in batch: whatever backward computes inside counts as zero, be it NaN."""
    if not standing_in:
        yield
        return
    handles = [p.register_hook(torch.zeros_like) for p in modules.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Buffers:
    """Buffers that training writes to (codebooks, running means) are kept as rank 0 has them."""

    def __init__(self, modules: nn.Module):
        self.modules = modules
        self._changing: list[str] = []
        self._seen = self._sums() if ranks.world_size() > 1 else None

    def _sums(self) -> torch.Tensor:
        sums = [_bits(buffer).sum(dtype=torch.int64).cpu() for buffer in _syncable(self.modules).values()]
        return torch.stack([torch.zeros((), dtype=torch.int64), *sums])[1:]

    def look(self) -> None:
        """Find out which buffers change, on any rank, and take rank 0's values; called by all, after a step."""
        if self._seen is None:
            return
        now = self._sums()
        changed = (now != self._seen).to(torch.int32)
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=ranks.cpu_group())
        for name, did in zip(_syncable(self.modules), changed.tolist(), strict=True):
            if did and name not in self._changing:
                self._changing.append(name)
        self._seen = now
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Take rank 0's values."""
        if not self._changing:
            return
        buffers = dict(self.modules.named_buffers())
        for name in self._changing:
            dist.broadcast(buffers[name], src=0)


def _syncable(modules: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in modules.named_buffers() if not buffer.is_complex()}


@torch.no_grad()
def assert_ranks_equal(modules: nn.Module, when: str) -> None:
    """Stop if a parameter or buffer differs between ranks in a single bit, and name it.

    Each rank sums the bits of each tensor on its device; the sums go round once.
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
        hint="is it changed outside of compute_forward and the optimizer, or drawn at random on each rank?",
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


def unreached(modules: nn.Module) -> list[str]:
    """Trainable parameters without a gradient, each whole module of them under its own name."""
    missing = {name for name, p in modules.named_parameters() if p.requires_grad and p.grad is None}
    if not missing:
        return []
    shortened: list[str] = []
    for name, module in modules.named_modules():  # parents come before their children
        inside = {f"{name}.{n}" for n, p in module.named_parameters() if p.requires_grad}
        if name and inside and inside <= missing and not any(name.startswith(f"{s}.") for s in shortened):
            shortened.append(name)
    covered = tuple(f"{name}." for name in shortened)
    return sorted([*shortened, *(name for name in missing if not name.startswith(covered or ("\0",)))])


def tell_unreached(modules: nn.Module, recipe: Mapping[str, Any]) -> None:
    """After the first backward: name what is trained in vain, by the keys of the recipe where it has some."""
    names = unreached(modules)
    if names and ranks.is_main():
        parts = Parts(modules, recipe)
        logger.warning("The loss does not reach these parameters, so they are not trained (right for a part that the "
                       "recipe leaves out, such as a decoder): %s",
                       ", ".join(map(parts.called, names)).replace("_orig_mod.", ""))


def talks_in_forward(module: nn.Module) -> bool:
    """Whether a layer asks the other ranks while it computes in training, which all of them must then do alike."""
    if isinstance(module, InputNormalization):
        return module.norm_type == "global"
    return isinstance(module, nn.SyncBatchNorm)


def convert_batch_norm(modules: nn.ModuleDict, device: torch.device) -> None:
    """As SpeechBrain does: statistics over all ranks, where the device has a kernel for it."""
    if device.type == "cpu" or ranks.world_size() == 1:
        return
    for name, module in modules.items():
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
            modules[name] = nn.SyncBatchNorm.convert_sync_batchnorm(module)
