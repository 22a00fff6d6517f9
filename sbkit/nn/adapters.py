"""Adapters for a frozen model: LoRA in its linear layers, Houlsby's adapters after its blocks.

    adapters: !new:sbkit.nn.adapters.LoRA
        module: !ref <encoder>
        targets: ["*.q_proj", "*.v_proj"]
        rank: 16

Adapted layers and their parameters keep their names, so recipes and code that use the model need no change.
For checkpoints that only have the adapters, see ``sbkit.train.checkpoint.adapted.Adapted``.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.errors import SbkitError

#: Names of the child modules that are added to an adapted layer.
LORA, HOULSBY = "lora", "adapter"
_NAMED = 12  # layers that a message lists


@functools.cache
def derived(added: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """Derive a class from ``kind`` whose forward is that of ``added``, for existing layers to change to.

    It can be pickled, although no module holds it: its layers are made by calling this again.
    """
    def reduce(layer: nn.Module, protocol: int) -> tuple[object, ...]:
        state = kind.__reduce_ex__(layer, max(protocol, 2))[2]
        return _new, (added, kind), state

    return type(kind.__name__, (added, kind), {"__module__": kind.__module__, "__reduce_ex__": reduce})


def _new(added: type[nn.Module], kind: type[nn.Module]) -> nn.Module:
    """Make an empty layer of a derived class, for pickle."""
    adapted = derived(added, kind)  # type: ignore[arg-type]  # mypy asks objects' __hash__
    return adapted.__new__(adapted)


class _WithLoRA(nn.Module):
    lora: nn.Module
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out + self.lora_scale * self.lora(x)


class _WithAdapter(nn.Module):
    adapter: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # what the layer itself returns
        out = super().forward(*args, **kwargs)
        if isinstance(out, tuple):
            return out[0] + self.adapter(out[0]), *out[1:]
        return out + self.adapter(out)


class Adapters(ABC):
    """Freezes a module and adds an adapter to each of some of its layers.

    module : the model to adapt
    targets : paths of layers within the model, with ``*`` for any part of a path. Each must match a layer; where a
        layer and one inside it match, only the outer one is adapted
    """

    added: type[nn.Module]
    """Has the forward of an adapted layer."""

    def __init__(self, module: nn.Module, targets: str | Iterable[str]):
        self.module = module
        self.targets = [targets] if isinstance(targets, str) else list(targets)
        self.layers = self._find()
        for name, parameter in module.named_parameters():
            if not is_added(name):
                parameter.requires_grad_(False)
        for path, layer in self.layers.items():
            if isinstance(layer, self.added):
                raise SbkitError("bad-value",
                                 f"{type(self).__name__}: targets names {path}, which has an adapter already",
                                 hint="adapt each layer once", key="targets", value=path)
            self.adapt(layer)
            layer.__class__ = derived(self.added, type(layer))  # type: ignore[arg-type]  # mypy takes a class for unhashable

    @abstractmethod
    def adapt(self, layer: nn.Module) -> None:
        """Add the modules of an adapter to one layer."""

    @abstractmethod
    def fits(self, layer: nn.Module) -> bool:
        """Whether a layer is of a kind that can be adapted."""

    def _find(self) -> dict[str, nn.Module]:
        """Return the layers that the targets name, by path; raises if a target names none that fits."""
        layers = {path: layer for path, layer in self.module.named_modules() if path and not is_added(path)}
        fitting = {path: layer for path, layer in layers.items() if self.fits(layer)}
        self._check_targets(layers, fitting)
        matched = [path for path in fitting if any(fnmatch.fnmatchcase(path, target) for target in self.targets)]
        return {path: fitting[path] for path in matched if not any(path.startswith(f"{outer}.") for outer in matched)}

    def _check_targets(self, layers: dict[str, nn.Module], fitting: dict[str, nn.Module]) -> None:
        missing = []
        unsupported: dict[str, None] = {}
        for target in self.targets:
            if fnmatch.filter(fitting, target):
                continue
            path = next(iter(fnmatch.filter(layers, target)), None)
            if path is None:
                missing.append(target)
            else:
                unsupported[path] = None
        problems = []
        if missing:
            problems.append(f"no layer of {type(self.module).__name__} is called {', '.join(missing)}")
        problems += [f"{path} is a {type(layers[path]).__name__}, which can't be adapted" for path in unsupported]
        if problems:
            patterns = _shortest_patterns(fitting)
            more = f" and {len(patterns) - _NAMED} more" if len(patterns) > _NAMED else ""
            raise SbkitError("no-such-part", f"{type(self).__name__}: targets: {'; '.join(problems)}", key="targets",
                             value=[*missing, *unsupported][0], hint=f"possible targets: "
                             f"{patterns[:_NAMED]}{more} (docs/how-to/finetune.md#adapters says which are of "
                             "attention)")


def _shortest_patterns(paths: Iterable[str]) -> list[str]:
    """Return the shortest pattern for each path, with numbers as ``*``: its end, if no other path has it, or all of it.
    """
    starred = dict.fromkeys(tuple("*" if part.isdigit() else part for part in path.split(".")) for path in paths)
    patterns = []
    for parts in starred:
        ends = [parts[-count:] for count in range(1, len(parts))]
        unique = [end for end in ends
                  if set(end) != {"*"} and sum(other[-len(end):] == end for other in starred) == 1]
        patterns.append(".".join(["*", *unique[0]] if unique else parts))
    return patterns


class LoRA(Adapters):
    """Adds the product of two narrow matrices, initially zero, to linear layers' weights (arXiv 2106.09685).

    module, targets : see ``Adapters``; the targets are ``torch.nn.Linear``
    rank : the inner dimension of the product
    alpha : the product is scaled by ``alpha / rank``; None: ``alpha`` is ``rank``
    dropout : of the adapter's input
    """

    added = _WithLoRA

    def __init__(self, module: nn.Module, targets: str | Iterable[str], rank: int = 16, alpha: float | None = None,
                 dropout: float = 0.0):
        if rank < 1:
            raise SbkitError("bad-value", f"LoRA: rank is {rank}, and must be at least 1",
                             hint="use 4 to 64", key="rank", value=rank)
        self.rank = rank
        self.alpha = float(rank if alpha is None else alpha)
        self.dropout = dropout
        super().__init__(module, targets)

    def fits(self, layer: nn.Module) -> bool:
        return isinstance(layer, nn.Linear)

    def adapt(self, layer: nn.Module) -> None:
        assert isinstance(layer, nn.Linear)
        down = nn.Linear(layer.in_features, self.rank, bias=False, device=layer.weight.device)
        up = nn.Linear(self.rank, layer.out_features, bias=False, device=layer.weight.device)
        nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        nn.init.zeros_(up.weight)
        layer.add_module(LORA, nn.Sequential(nn.Dropout(self.dropout), down, up))
        layer.lora_scale = self.alpha / self.rank  # type: ignore[assignment]  # a new attribute of the layer


class Houlsby(Adapters):
    """Adds a bottleneck with a residual connection after blocks, initially the identity (arXiv 1902.00751).

    module, targets : see ``Adapters``; the targets return a tensor [..., D], or a tuple that starts with one
    size : the width of the bottleneck
    width : D, for blocks without linear layers or layer norms to read it from
    """

    added = _WithAdapter

    def __init__(self, module: nn.Module, targets: str | Iterable[str], size: int = 64, width: int | None = None):
        if size < 1:
            raise SbkitError("bad-value", f"Houlsby: size is {size}, and must be at least 1", hint="use 16 to 256",
                             key="size", value=size)
        self.size, self.width = size, width
        super().__init__(module, targets)

    def fits(self, layer: nn.Module) -> bool:
        return self.width is not None or _width(layer) is not None

    def adapt(self, layer: nn.Module) -> None:
        width = self.width or _width(layer)
        assert width is not None
        device = next((parameter.device for parameter in layer.parameters()), None)
        down = nn.Linear(width, self.size, device=device)
        up = nn.Linear(self.size, width, device=device)
        nn.init.zeros_(up.weight)
        nn.init.zeros_(up.bias)
        layer.add_module(HOULSBY, nn.Sequential(nn.LayerNorm(width, device=device), down, nn.GELU(), up))


def is_added(name: str) -> bool:
    """Whether a parameter or module belongs to an adapter, by its path."""
    return not {LORA, HOULSBY}.isdisjoint(name.split("."))


def is_zero_at_first(name: str) -> bool:
    """Whether a parameter is of an adapter's last layer, by its path: zeros there make the adapter the identity."""
    return name.rpartition(".")[0].endswith((f".{LORA}.2", f".{HOULSBY}.3"))


@torch.no_grad()
def merge(module: nn.Module) -> int:
    """Merge each LoRA into its layer's weights and remove it; returns the number of merged layers."""
    adapted = [layer for layer in module.modules() if isinstance(layer, _WithLoRA)]
    for layer in adapted:
        weight, up, down = map(layer.get_parameter, ("weight", f"{LORA}.2.weight", f"{LORA}.1.weight"))
        weight.copy_(with_product(weight, up, down, layer.lora_scale))
        del layer.lora, layer.lora_scale
        layer.__class__ = type(layer).__bases__[1]
    return len(adapted)


def with_product(weight: Tensor, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """Return a weight with the scaled product of a LoRA's two matrices added in double precision."""
    return (weight.double() + scale * (up.double() @ down.double())).to(weight.dtype)


def _width(layer: nn.Module) -> int | None:
    """Return the width of a block's output, read off its last linear layer or layer norm."""
    widths = [inner.out_features if isinstance(inner, nn.Linear) else inner.normalized_shape[0]
              for inner in layer.modules() if isinstance(inner, (nn.Linear, nn.LayerNorm))]
    return widths[-1] if widths else None
