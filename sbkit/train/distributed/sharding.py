"""Models larger than a device: activations computed again in backward, parameters divided over ranks (FSDP2).

Both are keys of a YAML:

    activation_checkpointing: [TransformerEncoderLayer]   # class names, or paths such as model.1.encoder.layers.*
    fsdp: True                                            # or such a list: what is gathered as one piece
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from speechbrain.utils.checkpoints import hook_on_loading_state_dict_checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from sbkit.errors import SbkitError
from sbkit.train.checkpoint.files import write_state
from sbkit.train.checkpoint.state import load_file
from sbkit.train.distributed import parallel, ranks
from sbkit.train.distributed.ddp import Wrapped
from sbkit.train.distributed.parallel import Alone, Shell
from sbkit.train.keys import TrainKeys
from sbkit.train.state import Overrides

logger = logging.getLogger(__name__)


def wrap(shell: Shell, device: torch.device, keys: TrainKeys, overrides: Overrides, *, averages: bool,
         thaws: bool, search: bool, settles: bool) -> Alone:
    """What the recipe and the number of ranks ask for, around all of a Brain's modules.

    Arguments
    ---------
    keys, overrides : what the recipe asks for, and which methods are its own
    averages : a moving average of the weights is kept
    thaws : what is frozen at first trains later
    search, settles : see ``Wrapped``
    """
    parallel.convert_batch_norm(shell.owned, device)
    if keys.activation_checkpointing:
        checkpoint_activations(shell.owned, keys.activation_checkpointing)
    if ranks.world_size() == 1 or not any(p.requires_grad for p in shell.parameters()):
        return Alone(shell)
    if not keys.fsdp:
        return parallel.Hooked(shell) if overrides.fit_batch else Wrapped(shell, search, settles)
    if overrides.fit_batch or averages or thaws:
        other = "a fit_batch of the recipe's own" if overrides.fit_batch else "ema" if averages else \
            "a freeze that ends after some steps"
        raise SbkitError(f"fsdp does not go together with {other}", hint="leave one of them out")
    return Sharded(shell, device, keys.fsdp)


def find(modules: nn.Module, wanted: Iterable[Any], key: str) -> list[nn.Module]:
    """Modules by class, class name or path (``*`` stands for one part of it), outer ones before inner ones.

    key: of the YAML, for the message when an entry fits nothing
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
                         hint=f"name a class or a path; layers that repeat: {repeated}")
    return list(found.values())


def _fits(entry: Any, path: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    if any(kind.__name__ == entry for kind in type(module).__mro__):
        return True
    parts, wanted = path.split("."), str(entry).split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def blocks(modules: nn.Module) -> list[nn.Module]:
    """The layers that repeat: members of a ModuleList with several of one class."""
    found: dict[int, nn.Module] = {}
    for module in modules.modules():
        if isinstance(module, nn.ModuleList):
            kinds = [type(child) for child in module]
            found.update({id(child): child for child in module
                          if kinds.count(type(child)) > 1 and any(p.requires_grad for p in child.parameters())})
    return list(found.values())


# ------------------------------------------------------------ activations


def checkpoint_activations(modules: nn.Module, wanted: Any) -> None:
    """In training these modules keep their inputs only; backward runs their forward again.

    They stay the objects they were, so it doesn't matter how a recipe reaches them.
    """
    for module in find(modules, wanted, "activation_checkpointing"):
        if not isinstance(module, _Recomputed):
            module.__class__ = _recomputed(type(module))  # type: ignore[arg-type]  # mypy asks objects' __hash__


class _Recomputed:
    pass


@functools.cache
def _recomputed(kind: type[nn.Module]) -> type:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(kind.forward, self)
        if not (self.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return type(kind.__name__, (_Recomputed, kind), {"forward": forward, "__module__": kind.__module__})


# ------------------------------------------------------------ parameters


class Sharded(Alone):
    """FSDP2 around the shell: each rank keeps its part of every parameter, gradient and optimizer state.

    A block's parameters are gathered while it computes. A block has to be called (``layer(x)``); what is in
    no block can be reached in any way, since the shell gathers it around the whole forward.
    """

    def __init__(self, shell: Shell, device: torch.device, wanted: Any = True):
        super().__init__(shell)
        self.world = ranks.world_size()
        with torch.no_grad():
            for tensor in [*shell.parameters(), *shell.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        mesh = init_device_mesh(device.type, (self.world,))
        pieces = blocks(shell) if wanted is True else find(shell.owned, wanted, "fsdp")
        if not pieces:
            logger.warning("fsdp: no layers repeat, so all parameters are gathered as one piece")
        for piece in reversed(pieces):  # inner ones first
            fully_shard(piece, mesh=mesh)
        fully_shard(shell, mesh=mesh)

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """Gradients are divided after each micro-batch: whole ones kept until the last would not fit."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it every rank has all parameters, so that evaluations need not run in step."""
        pieces = [module for module in self.shell.modules() if isinstance(module, FSDPModule)]
        for piece in pieces:
            piece.set_reshard_after_forward(False, recurse=False)
            piece.unshard()
        try:
            yield
        finally:
            for piece in pieces:
                piece.reshard()
                piece.set_reshard_after_forward(piece is not self.module, recurse=False)


def is_sharded(obj: Any) -> bool:
    """A module or optimizer whose parameters are divided over ranks."""
    if isinstance(obj, nn.Module):
        return any(isinstance(p, DTensor) for p in obj.parameters())
    if isinstance(obj, torch.optim.Optimizer):
        return any(isinstance(p, DTensor) for group in obj.param_groups for p in group["params"])
    return False


def save_as_if_whole(checkpointer: Any) -> None:
    """Checkpoints look the same whether parameters are divided over ranks or not."""
    for name, obj in (checkpointer.recoverables if checkpointer is not None else {}).items():
        if is_sharded(obj):
            checkpointer.custom_save_hooks[name] = save_whole
            checkpointer.custom_load_hooks[name] = load_whole


def save_whole(obj: nn.Module | torch.optim.Optimizer, path: str | os.PathLike[str]) -> None:
    """Write the state dict that an undivided model would write; every rank takes part."""
    state = _whole(obj.state_dict())
    if ranks.is_main():
        write_state(state, path)


def load_whole(obj: nn.Module | torch.optim.Optimizer, path: str | os.PathLike[str], end_of_epoch: bool = True) -> None:
    """Load such a state dict; every rank takes part and keeps its share."""
    del end_of_epoch
    state = load_file(path)
    if isinstance(obj, nn.Module):
        take(obj, hook_on_loading_state_dict_checkpoint(state))
        return
    params = [p for group in obj.param_groups for p in group["params"]]
    for i, entry in state["state"].items():
        state["state"][i] = {key: _divided(value, params[i]) for key, value in entry.items()}
    obj.load_state_dict(state)


def take(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a module the state dict of an undivided one; where it is divided, every rank takes part and its share."""
    own = module.state_dict()
    module.load_state_dict({key: _divided(value, own.get(key)) for key, value in state.items()}, strict=True)


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_whole(item) for item in value)
    return value


def _divided(value: Any, like: Any) -> Any:
    """A whole tensor divided as ``like`` is, where the two are of one shape."""
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
