"""Factors of the learning rate by part of the model, from ``learning_rates`` and ``layer_decay`` of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import speechbrain as sb
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sbkit.errors import SbkitError
from sbkit.recipe.keys import is_task
from sbkit.recipe.parts import ParameterGroups
from sbkit.recipe.trace import on_fake_tensors

#: Length of the dummy utterance that shows the order of the layers.
_SECONDS = 3.0


def grouped(opt_class: Callable[..., Optimizer], wanted: Mapping[str, float], parts: ParameterGroups,
            ) -> Callable[..., Optimizer]:
    """Return the optimizer with a parameter group for each factor, which the group keeps as ``lr_scale``.

    Groups are saved with a readable ``name``: the parts in them, and the factor.
    """
    factor_of = {id(parts.parameters[path]): factor for path, factor in wanted.items()}
    part_of = {id(parameter): parts.name(path).partition(".")[0] for path, parameter in parts.parameters.items()}

    def build(params: Iterable[Any]) -> Optimizer:
        params = list(params)
        groups: list[dict[str, Any]] = params if params and isinstance(params[0], dict) else [{"params": params}]
        split: list[dict[str, Any]] = []
        for group in groups:  # by factor: 1 first, then from large to small
            by_factor: dict[float, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_factor.setdefault(factor_of.get(id(parameter), 1.0), []).append(parameter)
            split += [{**group, "params": by_factor[factor], "lr_scale": factor}
                      for factor in sorted(by_factor, key=lambda factor: (factor != 1, -factor))]
        optimizer = opt_class(split)
        for group in optimizer.param_groups:
            names = dict.fromkeys(part_of[id(parameter)] for parameter in group["params"] if id(parameter) in part_of)
            group["name"] = f"{group.get('name') or ', '.join(names)} x {group['lr_scale']:.3g}"
            group["lr"] = group["lr"] * group["lr_scale"]
        of_recipe = [{key: group[key] for key in ("lr_scale", "name")} for group in optimizer.param_groups]

        def replace_saved(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            """Replace a saved state's factors and names by the recipe's, which may have changed."""
            groups = [{**saved, **values} for saved, values in zip(state["param_groups"], of_recipe, strict=True)]
            return {**state, "param_groups": groups}

        optimizer.register_load_state_dict_pre_hook(replace_saved)
        return optimizer

    return build


# ------------------------------------------------------------ depth


def depths(brain: sb.Brain, parts: ParameterGroups) -> dict[str, int]:
    """Return the number of stacked layers above each parameter, by path; 0 for the top layer and what follows it.

    A training batch on fake tensors shows the order. Parameters that it uses before the first layer of the stack are
    below all layers.
    """
    if not is_task(brain):
        raise SbkitError("no-layer-order",
                         f"layer_decay needs the order of the layers, and {type(brain).__name__} has no dummy batch "
                         "that shows it", hint="derive it from sbkit.tasks.task.Task, or use learning_rates",
                         key="layer_decay")

    def record_order(_: object) -> dict[int, int]:
        with torch.no_grad(), _UseOrder(brain.modules) as uses:
            brain.loss_of(brain.dummy_batch(1, _SECONDS).to(brain.device))
        return uses.order

    order = on_fake_tensors(brain, record_order)
    layers = _used_stack(brain, order)
    if len(layers) < 2:
        raise SbkitError("no-layer-order", "layer_decay: no layers repeat in this model", hint="use learning_rates",
                         key="layer_decay")
    layers.sort(key=lambda layer: min(order[id(p)] for p in layer.parameters() if id(p) in order))
    depth_of = {id(p): len(layers) - 1 - place for place, layer in enumerate(layers) for p in layer.parameters()}
    first_use = min(order[key] for key in depth_of if key in order)
    for key, use in order.items():
        if use < first_use:
            depth_of[key] = len(layers)
    return {path: depth_of.get(id(p), 0) for path, p in parts.parameters.items()}


def _used_stack(brain: sb.Brain, order: Mapping[int, int]) -> list[nn.Module]:
    """Return those of the stacked layers that the loss uses.

    By default they are the list of layers of one class that has the most parameters in layers that the loss uses.
    """
    def used_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
        return [layer for layer in layers if any(id(p) in order for p in layer.parameters())]

    stacked = brain.stacked_layers()
    if stacked is not None:
        return used_of(stacked)
    candidates = [used_of(module) for module in brain.modules.modules()
                  if isinstance(module, nn.ModuleList) and len({type(layer) for layer in module}) == 1]
    return max((layers for layers in candidates if len(layers) > 1), default=[],
               key=lambda layers: sum(p.numel() for layer in layers for p in layer.parameters()))


class _UseOrder(TorchDispatchMode):
    """Records the order in which parameters are used."""

    def __init__(self, modules: nn.Module):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._parameters = {id(parameter) for parameter in modules.parameters()}
        self.order: dict[int, int] = {}

    def __torch_dispatch__(self, func: Callable[..., object], types: Iterable[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> object:
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self._parameters:
                self.order.setdefault(id(leaf), len(self.order))
        return func(*args, **(kwargs or {}))
