"""``--compile``: runs repeated layers through torch.compile, with one graph for all of them and for all lengths."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sbkit.errors import SbkitError, summary
from sbkit.recipe.parts import repeated_layers

logger = logging.getLogger(__name__)


class Compiled:
    """Marks the classes of layers whose forward is compiled."""


def compile_blocks(modules: nn.ModuleDict, keys: Iterable[str] | None, device: torch.device | str, *,
                   mode: str | None = None, fullgraph: bool = False) -> int:
    """Compile the repeated layers in ``modules``, and return their number; 0 if this machine has no compiler.

    Layers are changed in place, so their names, checkpoints and references to them stay valid. Only ``forward`` is
    compiled; hooks run as before. Sizes are symbolic, so one graph serves every length.

    keys : keys of ``modules``, from ``--compile_module_keys``; a module without repeated layers is compiled as a whole.
        None: all modules, and as a whole only if none of them has repeated layers
    mode, fullgraph : as in torch.compile
    """
    unknown = [key for key in keys or () if key not in modules]
    if unknown:
        raise SbkitError("bad-option", f"--compile_module_keys: there is no {', '.join(unknown)} under modules",
                         hint=f"choose among {', '.join(modules)}", key="compile_module_keys")
    named = [modules[key] for key in keys or modules]
    layers = {id(layer): layer for module in named for layer in repeated_layers(module)}
    if keys or not layers:
        whole = [module for module in named if not repeated_layers(module)]
        layers |= {id(part): part for module in whole for part in _parts(module)}
    if not layers:
        logger.warning("--compile: there is nothing to compile under %s", ", ".join(keys or modules))
        return 0
    reason = compile_problem(str(device))
    if reason is not None:
        logger.warning("--compile: this machine can't compile for %s, so the run continues without it: %s", device,
                       reason)
        return 0
    for layer in layers.values():
        if not isinstance(layer, Compiled):
            kind = type(layer)
            layer.__class__ = _compiled(kind, mode, fullgraph)  # type: ignore[arg-type]  # mypy asks objects' __hash__
    logger.info("--compile: %d layers will be compiled during the first epoch%s", len(layers),
                "; on a CPU, steps are often slower with it" if torch.device(device).type == "cpu" else "")
    return len(layers)


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return the module itself, or the members of a container without a forward; only those that train."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [part for child in module.children() for part in _parts(child)]
    return [module] if any(parameter.requires_grad for parameter in module.parameters()) else []


@functools.cache
def _compiled(kind: type[nn.Module], mode: str | None, fullgraph: bool) -> type:
    # "reduce-overhead" captures CUDA graphs layer by layer; here steps are captured as a whole (see ``graphs``).
    modes = [name for name in torch._inductor.list_mode_options() if name != "reduce-overhead"]
    if mode is not None and mode not in modes:
        raise SbkitError("bad-option",
                         f"--compile_mode: torch has no mode {mode!r}",
                         hint=f"choose among {', '.join(modes)}",
                         key="compile_mode", value=mode)
    options = torch._inductor.list_mode_options(mode or "default", dynamic=True)
    options["triton.cudagraphs"] = False
    # On a CPU this optimization fixes strides around convolutions, so each length would be compiled again.
    options["layout_optimization"] = False
    # An assertion of this one, which isn't meant for symbolic sizes yet, fails on a GPU where an encoder has chunks.
    options["triton.coalesce_tiling_analysis"] = False
    compiled_forward = torch.compile(kind.forward, options=options, fullgraph=fullgraph, dynamic=True)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> object:
        return compiled_forward(self, *args, **kwargs)

    return type(kind.__name__, (Compiled, kind), {"forward": forward, "__module__": kind.__module__})


@functools.cache
def compile_problem(device: str) -> str | None:
    """Compile a tiny function; return what failed, in one line, or None."""
    try:
        torch.compile(lambda x: x * 2 + 1, dynamic=True)(torch.ones(3, device=device))
    except Exception as error:  # a missing C++ compiler, Triton or Python headers each raise something else
        return summary(error)
    return None


def compiled_graphs() -> int:
    """Return the number of graphs compiled in this process; it should stop growing after warm-up."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
