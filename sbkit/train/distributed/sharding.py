"""Training of large models: recomputing activations in backward, and dividing parameters over ranks (FSDP2).

Both are keys of a recipe:

    activation_checkpointing: [TransformerEncoderLayer]   # class names, or paths such as model.1.encoder.layers.*
    fsdp: True                                            # or such a list of layers, each gathered as one piece
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
import torch.distributed as dist
from speechbrain.utils.checkpoints import Checkpointer, hook_on_loading_state_dict_checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

from sbkit.errors import SbkitError
from sbkit.nn.adapters import derived
from sbkit.train.checkpoint.files import write_state
from sbkit.train.checkpoint.state import load_file, load_optimizer
from sbkit.train.distributed import parallel, ranks
from sbkit.train.distributed.ddp import DDPWrapper
from sbkit.train.distributed.parallel import LossModule, ModuleWrapper
from sbkit.train.keys import TrainKeys
from sbkit.train.state import Overrides

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

#: Modules by class, class name or path.
Wanted = str | type | Iterable[str | type]


def wrap(loss_module: LossModule, device: torch.device, keys: TrainKeys, overrides: Overrides, *,
         undivided: Sequence[str], search: bool, search_once: bool) -> ModuleWrapper:
    """Wrap all modules of a Brain as the recipe and the number of ranks require.

    Arguments
    ---------
    keys, overrides : the recipe's keys, and the methods that it overrides
    undivided : what else in the recipe needs parameters whole, as a message calls it
    search, settles : see ``DDPWrapper``
    """
    parallel.convert_batch_norm(loss_module.owned)
    if keys.activation_checkpointing:
        checkpoint_activations(loss_module.owned, keys.activation_checkpointing)
    if ranks.world_size() == 1 or not any(p.requires_grad for p in loss_module.parameters()):
        return ModuleWrapper(loss_module)
    if not keys.fsdp:
        return parallel.HookWrapper(loss_module) if overrides.fit_batch else DDPWrapper(loss_module, search,
                                                                                        search_once)
    if others := [*(["a recipe's own fit_batch"] if overrides.fit_batch else []), *undivided]:
        raise SbkitError(f"fsdp can't be used together with {others[0]}", hint="remove one of them")
    return Sharded(loss_module, device, keys.fsdp)


def find(modules: nn.Module, wanted: Wanted, key: str) -> list[nn.Module]:
    """Return modules by class, class name or path (``*`` matches one part of a path), outer before inner ones.

    key : the recipe's key, for the error if an entry matches nothing
    """
    wanted = [wanted] if isinstance(wanted, (str, type)) else list(wanted)
    found, missing = {}, []
    for entry in wanted:
        hits = {id(module): module for path, module in modules.named_modules() if path and _fits(entry, path, module)}
        found.update(hits)
        if not hits:
            missing.append(entry if isinstance(entry, str) else getattr(entry, "__name__", repr(entry)))
    if missing:
        repeated = ", ".join(sorted({type(m).__name__ for m in blocks(modules)})) or "none"
        raise SbkitError(f"{key}: nothing under modules is called {', '.join(map(repr, missing))}",
                         hint=f"name a class or a path; repeated layers: {repeated}")
    return list(found.values())


def _fits(entry: object, path: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    if any(kind.__name__ == entry for kind in type(module).__mro__):
        return True
    parts, wanted = path.split("."), str(entry).split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def blocks(modules: nn.Module) -> list[nn.Module]:
    """Return the repeated layers: members of a ModuleList with several of the same class."""
    found: dict[int, nn.Module] = {}
    for module in modules.modules():
        if isinstance(module, nn.ModuleList):
            kinds = [type(child) for child in module]
            found.update({id(child): child for child in module
                          if kinds.count(type(child)) > 1 and any(p.requires_grad for p in child.parameters())})
    return list(found.values())


# ------------------------------------------------------------ activations


def checkpoint_activations(modules: nn.Module, wanted: Wanted) -> None:
    """Let modules keep only their inputs in training, and run their forward again in backward.

    Modules are changed in place, so all references to them stay valid.
    """
    for module in find(modules, wanted, "activation_checkpointing"):
        if not isinstance(module, _Recomputed):
            module.__class__ = derived(_Recomputed, type(module))  # type: ignore[arg-type]  # mypy asks objects' __hash__


class _Recomputed(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> object:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


# ------------------------------------------------------------ parameters


class Sharded(ModuleWrapper):
    """FSDP2 around the ``LossModule``: each rank holds a part of every parameter, gradient and optimizer state.

    The parameters of a block are gathered while it computes, so a block must be called (``layer(x)``). Parameters
    outside of blocks can be used in any way, since it gathers them for the whole forward.
    """

    def __init__(self, loss_module: LossModule, device: torch.device, wanted: Wanted | Literal[True] = True):
        super().__init__(loss_module)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # here, because it imports much that few runs need

        self.world = ranks.world_size()
        with torch.no_grad():
            for tensor in [*loss_module.parameters(), *loss_module.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        mesh = init_device_mesh(device.type, (self.world,))
        pieces = blocks(loss_module) if wanted is True else find(loss_module.owned, wanted, "fsdp")
        if not pieces:
            logger.warning("fsdp: there are no repeated layers, so all parameters are gathered as one piece")
        for piece in reversed(pieces):  # inner ones first
            fully_shard(piece, mesh=mesh)
        fully_shard(loss_module, mesh=mesh)

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """Do nothing: keeping whole gradients until the last micro-batch would need too much memory."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all parameters on every rank inside this context, so that ranks can evaluate independently."""
        from torch.distributed.fsdp import FSDPModule

        pieces = [module for module in self.loss_module.modules() if isinstance(module, FSDPModule)]
        for piece in pieces:
            piece.set_reshard_after_forward(False, recurse=False)
            piece.unshard()
        try:
            yield
        finally:
            for piece in pieces:
                piece.reshard()
                piece.set_reshard_after_forward(piece is not self.module, recurse=False)


def is_sharded(obj: object) -> bool:
    """Return whether the parameters of a module or optimizer are divided over ranks."""
    if isinstance(obj, nn.Module):
        return any(map(_is_part, obj.parameters()))
    if isinstance(obj, torch.optim.Optimizer):
        return any(_is_part(p) for group in obj.param_groups for p in group["params"])
    return False


def _is_part(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a ``DTensor``; without importing that, which a process without such tensors needn't."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def save_unsharded(checkpointer: Checkpointer | None) -> None:
    """Make checkpoints of divided parameters the same as those of undivided ones."""
    if checkpointer is None:
        return
    for name, obj in checkpointer.recoverables.items():
        if is_sharded(obj):
            checkpointer.custom_save_hooks[name] = save_full
            checkpointer.custom_load_hooks[name] = load_full


def save_full(obj: nn.Module | torch.optim.Optimizer, path: str | os.PathLike[str]) -> None:
    """Write the state dict of the undivided object; all ranks must call it."""
    state = full_value(obj.state_dict())
    if ranks.is_main():
        write_state(state, path)


def load_full(obj: nn.Module | torch.optim.Optimizer, path: str | os.PathLike[str], end_of_epoch: bool = True) -> None:
    """Load the state dict of the undivided object; all ranks must call it."""
    del end_of_epoch
    state = load_file(path)
    if isinstance(obj, nn.Module):
        load_full_state(obj, hook_on_loading_state_dict_checkpoint(state))
        return
    params = [p for group in obj.param_groups for p in group["params"]]
    for i, entry in state["state"].items():
        state["state"][i] = {key: _sharded_like(value, params[i]) for key, value in entry.items()}
    load_optimizer(obj, state, path)


def load_full_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the state dict of an undivided module; if this one is divided, all ranks must call it."""
    own = module.state_dict()
    module.load_state_dict({key: _sharded_like(value, own.get(key)) for key, value in state.items()}, strict=True)


def full_value(value: object) -> object:
    """Return a state with its divided tensors whole, on the CPU; all ranks must call it."""
    if _is_part(value):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: full_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(full_value(item) for item in value)
    return value


def _sharded_like(value: object, like: object) -> object:
    """Divide a whole tensor as ``like`` is divided, if both have the same shape."""
    if not _is_part(like) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
