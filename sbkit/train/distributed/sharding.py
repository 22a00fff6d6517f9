"""Training of large models: parameters sharded over ranks (FSDP2), and checkpoints of them as of full parameters.

In a recipe:

    fsdp: True      # or a list of layers, each gathered as one unit: class names, or paths such as model.1.layers.*
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from speechbrain.utils.checkpoints import hook_on_loading_state_dict_checkpoint
from torch import nn

from sbkit.recipe.parts import LayerNames, layers_called, repeated_layers
from sbkit.train.checkpoint.files import write_state
from sbkit.train.checkpoint.state import load_file, load_optimizer
from sbkit.train.distributed import ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)


class ShardedModules(nn.Module):
    """FSDP2 around all modules of a Brain: each rank holds a part of every parameter, gradient and optimizer state.

    The parameters of a block are gathered while it computes, so a block must be called (``layer(x)``). Parameters
    outside of blocks can be used in any way, since they are gathered for the whole forward. Gradients are sharded in
    each backward, also of micro-batches that are not the last of their step: keeping full ones until then would need
    too much memory.

    compute : runs forward and loss of a batch
    """

    def __init__(self, modules: nn.ModuleDict, compute: Callable[[Any], Any], device: torch.device,
                 wanted: LayerNames | Literal[True] = True):
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # here, because it imports much that few runs need

        self.owned = modules
        self.compute = compute
        self.computed: Any = None  # what ``compute`` returned last
        mesh = init_device_mesh(device.type, (ranks.world_size(),))
        units = repeated_layers(self) if wanted is True else layers_called(modules, wanted, "fsdp")
        if not units:
            logger.warning("fsdp: there are no repeated layers, so all parameters are gathered as one unit")
        for unit in reversed(units):  # inner ones first
            fully_shard(unit, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, batch: Any) -> torch.Tensor:  # of the recipe's class
        self.computed = self.compute(batch)
        return self.computed.loss.total

    def loss_of(self, batch: Any) -> Any:  # what ``compute`` returns
        """Compute as ``compute`` does, with a total whose backward shards the gradients."""
        total = self(batch)
        computed = self.computed
        self.computed = None
        return computed._replace(loss=computed.loss._replace(total=total))

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all parameters on every rank inside this context, so that ranks can evaluate independently."""
        from torch.distributed.fsdp import FSDPModule

        units = [module for module in self.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()
                unit.set_reshard_after_forward(not isinstance(unit, ShardedModules), recurse=False)


def is_sharded(obj: object) -> bool:
    """Return whether the parameters of a module or optimizer are sharded over ranks."""
    if isinstance(obj, nn.Module):
        return any(map(_is_dtensor, obj.parameters()))
    if isinstance(obj, torch.optim.Optimizer):
        return any(_is_dtensor(p) for group in obj.param_groups for p in group["params"])
    return False


def _is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a ``DTensor``, without importing that class."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def save_full(obj: nn.Module | torch.optim.Optimizer, path: str | os.PathLike[str]) -> None:
    """Write the full state dict of a sharded object; all ranks must call it."""
    state = full_value(obj.state_dict())
    if ranks.is_main():
        write_state(state, path)


def load_full(obj: nn.Module | torch.optim.Optimizer, path: str | os.PathLike[str], end_of_epoch: bool = True) -> None:
    """Load a full state dict into a sharded object; all ranks must call it."""
    del end_of_epoch  # SpeechBrain gives it to every load hook; tensors don't depend on it
    state = load_file(path)
    if isinstance(obj, nn.Module):
        load_full_state(obj, hook_on_loading_state_dict_checkpoint(state))
        return
    params = [p for group in obj.param_groups for p in group["params"]]
    for i, entry in state["state"].items():
        state["state"][i] = {key: _sharded_like(value, params[i]) for key, value in entry.items()}
    load_optimizer(obj, state, path)


def load_full_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a full state dict into a module; if it is sharded, all ranks must call it."""
    sharded = module.state_dict()
    module.load_state_dict({key: _sharded_like(value, sharded.get(key)) for key, value in state.items()}, strict=True)


def full_value(value: object) -> object:
    """Return a state with full tensors instead of sharded ones, on the CPU; all ranks must call it."""
    if _is_dtensor(value):
        return value.full_tensor().cpu()
    if isinstance(value, dict):  # any class of it, which torch's tree_map would take for a value
        return {key: full_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(full_value(item) for item in value)
    return value


def _sharded_like(value: object, like: object) -> object:
    """Shard a full tensor as ``like`` is sharded, if both have the same shape."""
    if not _is_dtensor(like) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
