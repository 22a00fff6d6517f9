"""Learning rates by part of the model: the schedule's rate times a factor for each parameter."""

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
from sbkit.recipe.parts import ParameterGroups
from sbkit.recipe.trace import on_fake_tensors

Rate = float | torch.Tensor  # a group's rate may be either
#: Length of the stand-in utterance that shows the order of the layers.
_SECONDS = 3.0


def grouped(opt_class: Callable[..., Optimizer], wanted: Mapping[str, float], parts: ParameterGroups,
            ) -> Callable[..., Optimizer]:
    """Return the optimizer with a parameter group for each factor; schedules read the factor as ``lr_scale``.

    Groups are saved with a readable ``name``: the parts in them, and the factor.
    """
    by_id = {id(parts.parameters[path]): factor for path, factor in wanted.items()}
    called = {id(parameter): parts.name(path).partition(".")[0] for path, parameter in parts.parameters.items()}

    def build(params: Iterable[Any]) -> Optimizer:
        params = list(params)
        groups: list[dict[str, Any]] = params if params and isinstance(params[0], dict) else [{"params": params}]
        split: list[dict[str, Any]] = []
        for group in groups:  # by factor: 1 first, then from large to small
            inside: dict[float, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                inside.setdefault(by_id.get(id(parameter), 1.0), []).append(parameter)
            split += [{**group, "params": inside[factor], "lr_scale": factor}
                      for factor in sorted(inside, key=lambda factor: (factor != 1, -factor))]
        optimizer = opt_class(split)
        for group in optimizer.param_groups:
            names = dict.fromkeys(called[id(parameter)] for parameter in group["params"] if id(parameter) in called)
            group["name"] = f"{group.get('name') or ', '.join(names)} x {group['lr_scale']:.3g}"
            group["lr"] = group["lr"] * group["lr_scale"]
        ours = [{key: group[key] for key in ("lr_scale", "name")} for group in optimizer.param_groups]
        # The recipe's factors and names replace those of a saved state: it may have changed.
        optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "param_groups": [
            {**group, **own} for group, own in zip(state["param_groups"], ours, strict=True)]})
        return optimizer

    return build


def base_lr(group: Mapping[str, Any]) -> Rate:
    """Return the schedule's rate for a group, without the group's factor."""
    return group["lr"] / group.get("lr_scale", 1.0)


# ------------------------------------------------------------ depth


def depths(brain: sb.Brain, parts: ParameterGroups) -> dict[str, int]:
    """Return the number of stacked layers above each parameter, by path; 0 for the top layer and what follows it.

    A training batch on fake tensors shows the order. Parameters that it uses before the first layer of the stack are
    below all layers.
    """
    if not hasattr(brain, "stand_in"):
        raise SbkitError(f"layer_decay needs the order of the layers, and {type(brain).__name__} has no stand-in batch "
                         "that shows it", hint="derive it from sbkit.tasks.task.Task, or use learning_rates")

    def used(_: object) -> dict[int, int]:
        with torch.no_grad(), _UseOrder(brain.modules) as uses:
            brain.loss_of(brain.stand_in(1, _SECONDS).to(brain.device))
        return uses.order

    order, stacked = on_fake_tensors(brain, used), brain.stacked_layers()
    # By default the list of layers of one class that has the most parameters that the loss uses.
    candidates = [stacked] if stacked is not None else [
        list(module) for module in brain.modules.modules() if isinstance(module, nn.ModuleList)
        and len({type(layer) for layer in module}) == 1]
    reached = [[layer for layer in each if any(id(p) in order for p in layer.parameters())] for each in candidates]
    layers = max((each for each in reached if stacked is not None or len(each) > 1), default=[],
                 key=lambda each: sum(p.numel() for layer in each for p in layer.parameters()))
    if len(layers) < 2:
        raise SbkitError("layer_decay: no layers repeat in this model", hint="use learning_rates")
    layers.sort(key=lambda layer: min(order[id(p)] for p in layer.parameters() if id(p) in order))
    above = {id(p): len(layers) - 1 - place for place, layer in enumerate(layers) for p in layer.parameters()}
    first = min(order[known] for known in above if known in order)
    below = {known for known, when in order.items() if when < first}
    return {path: len(layers) if id(p) in below else above.get(id(p), 0) for path, p in parts.parameters.items()}


class _UseOrder(TorchDispatchMode):
    """Records the order in which parameters are used."""

    def __init__(self, modules: nn.Module):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._known = {id(parameter) for parameter in modules.parameters()}
        self.order: dict[int, int] = {}

    def __torch_dispatch__(self, func: Callable[..., object], types: Iterable[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> object:
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self._known:
                self.order.setdefault(id(leaf), len(self.order))
        return func(*args, **(kwargs or {}))
