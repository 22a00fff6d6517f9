"""Data parallelism around all modules at once: averaging gradients, and keeping buffers equal on all ranks.

``Brain`` runs forward and loss inside one ``LossModule`` that holds all its modules. With several processes DDP wraps
only that one (see ``ddp``), so ``self.modules.x`` stays the module itself. A recipe that overrides ``fit_batch`` may
call layers and ``backward`` in any order (a GAN, two optimizers). There, hooks on the parameters record which have
gradients, and these are averaged at the end of each backward.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from speechbrain.processing.features import InputNormalization
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from sbkit.errors import SbkitError
from sbkit.nn import sync_batch_norm
from sbkit.recipe.parts import ParameterGroups
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

# Maximum size of one all-reduce in ``average_gradients``.
_BUCKET_BYTES = 64 << 20


class LossModule(nn.Module):
    """All modules of a Brain as one module; its forward computes the loss of a batch.

    run : computes from a batch the scalar tensor to call ``backward`` on
    """

    _ddp_params_and_buffers_to_ignore: list[str]  # read by DDP

    def __init__(self, modules: nn.ModuleDict, run: Callable[[Any], torch.Tensor]):
        super().__init__()
        self.owned = modules
        self.forward = run


class ModuleWrapper:
    """The interface to wrapped modules; the class itself is for one process, which has nothing to synchronise."""

    world = 1
    #: Whether gradients can be averaged after a backward instead of during it.
    can_wait = False
    #: Whether each backward searches for unused parameters.
    searches = False
    #: Names of parameters that the first step used and a later one did not, or the other way round.
    changed: frozenset[str] | set[str] = frozenset()

    def __init__(self, loss_module: LossModule):
        self.loss_module = loss_module

    @property
    def module(self) -> nn.Module:
        """The module to call with a batch, to get its loss."""
        return self.loss_module

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """Accumulate gradients inside this context, without averaging them."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Average gradients that were accumulated in ``no_sync``, if no backward outside it follows."""

    def complete(self, loss: torch.Tensor) -> None:
        """Complete the exchange of gradients after ``loss.backward()``, for parameters that it did not use."""

    def note_unreached(self) -> None:
        """Record the parameters that the first step did not use; called before the update."""

    def exclude_unreached(self) -> None:
        """Exclude the parameters that ``note_unreached`` recorded; called after the update."""

    def search(self) -> None:
        """Search for unused parameters in each backward from now on."""

    def reset(self) -> None:
        """Start again as before the first step, for other trainable parameters; all ranks call it between steps."""

    def gathered(self) -> contextlib.AbstractContextManager[object]:
        """Let each rank evaluate on its own inside this context."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Remove the wrapper; a new ``fit`` makes a new one."""


class HookWrapper(ModuleWrapper):
    """Averages gradients at the end of each backward, by hooks on the parameters."""

    def __init__(self, loss_module: LossModule):
        super().__init__(loss_module)
        self.world = ranks.world_size()
        self._sync = True
        self._handles: list[Any] = []
        self.reset()
        ranks.take_from_main([*loss_module.parameters(), *loss_module.buffers()])

    def reset(self) -> None:
        self.close()
        self._parameters = [p for p in self.loss_module.parameters() if p.requires_grad]
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
    """Replace gradients by their mean over ranks; a parameter without gradient on all ranks keeps ``grad`` None.

    reached : positions of the parameters with new gradients on this rank (default: all that have a gradient)
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
        bucket.append(parameter.grad.detach())
        if sum(g.numel() * g.element_size() for g in bucket) >= _BUCKET_BYTES:
            _average(bucket)
            bucket.clear()
    for bucket in filter(None, buckets.values()):
        _average(bucket)


def _average(grads: list[torch.Tensor]) -> None:
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= ranks.world_size()
    torch._foreach_copy_(grads, list(_unflatten_dense_tensors(flat, grads)))


@contextlib.contextmanager
def zeroed_if(placeholder: bool, modules: nn.Module) -> Iterator[None]:
    """Set all gradients of backwards inside this context to 0, NaN included, if the batch is a placeholder."""
    if not placeholder:
        yield
        return
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
        self._changing: list[str] = []
        self._seen = self._sums() if ranks.world_size() > 1 else None

    def _sums(self) -> torch.Tensor:
        buffers = _syncable(self.modules).values()
        return torch.tensor([_bits(buffer).sum(dtype=torch.int64).item() for buffer in buffers], dtype=torch.int64)

    def detect_changes(self) -> None:
        """Find the buffers that changed on any rank, and take rank 0's values; all ranks call it after a step."""
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

    def sync(self) -> None:
        """Take rank 0's values of the buffers that change."""
        if self._changing:
            buffers = dict(self.modules.named_buffers())
            ranks.take_from_main(buffers[name] for name in self._changing)


def _syncable(modules: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in modules.named_buffers() if not buffer.is_complex()}


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


def shortened(missing: set[str], modules: nn.Module, warned: Collection[str] = ()) -> list[str]:
    """Return names of parameters; a module whose trainable ones are all among them is named as a whole.

    warned : parameters that don't count, because an earlier warning has named them
    """
    if not missing:
        return []
    whole: list[str] = []
    for name, module in modules.named_modules():  # parents come before their children
        inside = {f"{name}.{n}" for n, p in module.named_parameters() if p.requires_grad}.difference(warned)
        if name and inside and inside <= missing and not any(name.startswith(f"{s}.") for s in whole):
            whole.append(name)
    covered = tuple(f"{name}." for name in whole)
    return sorted([*whole, *(name for name in missing if not name.startswith(covered or ("\0",)))])


def warn_unreached(modules: nn.Module, recipe: Mapping[str, Any], warned: set[str]) -> None:
    """Warn of parameters without a gradient after the first backward, with their names in the recipe.

    warned : the parameters of earlier warnings, which are not named again; updated here
    """
    unreached = {name for name, p in modules.named_parameters() if p.requires_grad and p.grad is None}
    names = shortened(unreached - warned, modules, warned)
    if names and ranks.is_main():
        parts = ParameterGroups(modules, recipe)
        logger.warning("The loss does not reach these parameters, so they are not trained (expected for a part that "
                       "the recipe does not use, such as a decoder): %s",
                       ", ".join(map(parts.name, names)).replace("_orig_mod.", ""))
    warned |= unreached


def communicates_in_forward(module: nn.Module) -> bool:
    """Return whether a layer communicates between ranks in its forward, so that all ranks must call it together."""
    if isinstance(module, InputNormalization):
        return module.norm_type == "global"
    return isinstance(module, (nn.SyncBatchNorm, sync_batch_norm.SyncBatchNorm))


def convert_batch_norm(modules: nn.ModuleDict) -> None:
    """Use batch statistics of all ranks, as SpeechBrain does on a GPU."""
    if ranks.world_size() == 1:
        return
    for name, module in modules.items():
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
            modules[name] = sync_batch_norm.convert(module)
