"""``--compile``: the layers that repeat run through torch.compile, one graph for all of them and for all lengths."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sbkit.errors import SbkitError, summary
from sbkit.train.distributed.sharding import blocks

logger = logging.getLogger(__name__)


class _Compiled:
    pass


def compile_blocks(modules: nn.ModuleDict, keys: Iterable[str] | None, device: torch.device | str, *,
                   mode: str | None = None, fullgraph: bool = False) -> int:
    """Compile the layers that repeat under ``modules``; gives how many, 0 where this machine has no compiler.

    They stay the objects they were, so that names and checkpoints do, however a recipe reaches them. Only ``forward``
    is compiled: hooks of a layer run as ever. Sizes are symbols in the graph, so that it serves every length.

    Arguments
    ---------
    keys : of ``modules``, as ``--compile_module_keys`` names them: where nothing repeats there, the module itself is
        compiled; None: all of them, and the modules themselves only where nothing repeats in any
    mode, fullgraph : torch.compile's
    """
    unknown = [key for key in keys or () if key not in modules]
    if unknown:
        raise SbkitError(f"--compile_module_keys: there is no {', '.join(unknown)} under modules",
                         hint=f"choose among {', '.join(modules)}")
    named = [modules[key] for key in keys or modules]
    found = {id(layer): layer for module in named for layer in blocks(module)}
    if keys or not found:
        whole = [module for module in named if not blocks(module)]
        found |= {id(part): part for module in whole for part in _parts(module)}
    if not found:
        logger.warning("--compile: there is nothing to compile under %s", ", ".join(keys or modules))
        return 0
    reason = _why_not(str(device))
    if reason is not None:
        logger.warning("--compile: this machine can't compile for %s, so the run goes on without it: %s", device,
                       reason)
        return 0
    # Within DDP dynamo cuts what it compiles at the edges of DDP's buckets, so that gradients can go round before a
    # graph ends. Layers are smaller than that: they would lose their fusions, and gain nothing.
    torch._dynamo.config.optimize_ddp = False
    for module in found.values():
        if not isinstance(module, _Compiled):
            kind = type(module)
            module.__class__ = _compiled(kind, mode, fullgraph)  # type: ignore[arg-type]  # mypy asks objects' __hash__
    logger.info("--compile: %d layers are compiled as the first epoch reaches them%s", len(found),
                "; on a CPU, steps have been longer with it" if torch.device(device).type == "cpu" else "")
    return len(found)


def _parts(module: nn.Module) -> list[nn.Module]:
    """The module, or what a container without a forward of its own holds; only what trains."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [part for child in module.children() for part in _parts(child)]
    return [module] if any(parameter.requires_grad for parameter in module.parameters()) else []


@functools.cache
def _compiled(kind: type[nn.Module], mode: str | None, fullgraph: bool) -> type:
    known = torch._inductor.list_mode_options()
    if mode is not None and mode not in known:
        raise SbkitError(f"--compile_mode: torch has no mode {mode!r}", hint=f"choose among {', '.join(known)}")
    options = torch._inductor.list_mode_options(mode or "default", dynamic=True)
    # On a CPU it gives what lies beside a convolution strides of one length, so that each length is compiled anew.
    options["layout_optimization"] = False
    run = torch.compile(kind.forward, options=options, fullgraph=fullgraph, dynamic=True)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    return type(kind.__name__, (_Compiled, kind), {"forward": forward, "__module__": kind.__module__})


@functools.cache
def _why_not(device: str) -> str | None:
    """Compile something tiny; what went wrong, in one line, where it did."""
    try:
        torch.compile(_tiny, dynamic=True)(torch.ones(3, device=device))
    except Exception as error:  # no C++ compiler, no Triton, no Python headers: each is told in its own way
        return summary(error)
    return None


def _tiny(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


class CudaGraphs:
    """What layers that run as CUDA graphs ask of a loop: what a replay gives lies where the next one writes.

    on: whether they do; else nothing is done
    """

    on = False

    def look(self, device: torch.device | str, mode: str | None) -> None:
        """Whether this mode of torch.compile records them there."""
        options = torch._inductor.list_mode_options(mode or "default")
        self.on = torch.device(device).type == "cuda" and bool(options.get("triton.cudagraphs"))

    def next_batch(self) -> None:
        """What the layers gave before is not looked at any more.

        Without it torch takes each layer for the first of a new batch where there is no backward to come, and what it
        is given, out of the layer before, for overwritten.
        """
        if self.on:
            torch.compiler.cudagraph_mark_step_begin()

    def keep_gradients(self, modules: nn.Module) -> None:
        """Take gradients that another batch is to be added to out of the memory that its backward writes into."""
        held = [(p, p.grad) for p in modules.parameters() if p.grad is not None] if self.on else []
        if held:
            kept = torch._foreach_mul([grad for _, grad in held], 1.0)
            for (parameter, _), grad in zip(held, kept, strict=True):
                parameter.grad = grad


def graphs() -> int:
    """How many graphs this process has compiled so far: after warm-up it grows no more."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
