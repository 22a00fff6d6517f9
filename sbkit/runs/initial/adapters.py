"""LoRA in a source: kept where the model has the same one, else merged into the weights that it was added to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from sbkit.errors import SbkitError
from sbkit.nn.adapters import LORA, with_product

_DOWN, _UP = f".{LORA}.1.weight", f".{LORA}.2.weight"


def merge(theirs: dict[str, torch.Tensor], found: Mapping[str, str], modules: nn.Module,
          scale_of: Callable[[str], float | None]) -> set[str]:
    """Merge, in place, each LoRA that the model does not have; gives the names of the weights that changed.

    Arguments
    ---------
    theirs : the source's tensors
    found : the names there of the model's tensors
    modules : the model
    scale_of : by how much a LoRA of the source counts, by the name of its layer
    """
    paths = {name: path for path, name in found.items()}
    merged = set()
    for layer in [name.removesuffix(_DOWN) for name in theirs if name.endswith(_DOWN)]:
        scale = scale_of(layer)
        if _is_own(layer, theirs, paths, modules, scale):
            continue
        weight = theirs.get(f"{layer}.weight")
        if scale is None or weight is None:
            missing = "the weight that it was added to" if weight is None else "a recipe that says how much it counts"
            raise SbkitError(f"init_from: there is a LoRA for {layer}, and not {missing}",
                             hint="name the folder of the run that trained it")
        theirs[f"{layer}.weight"] = with_product(weight, theirs.pop(layer + _UP), theirs.pop(layer + _DOWN), scale)
        merged.add(f"{layer}.weight")
    return merged


def _is_own(layer: str, theirs: Mapping[str, torch.Tensor], paths: Mapping[str, str], modules: nn.Module,
            scale: float | None) -> bool:
    """Whether the model's layer has the same LoRA, so that it can go on with this one."""
    for name in (layer + _DOWN, layer + _UP):
        path = paths.get(name)
        if path is None or modules.get_parameter(path).shape != theirs[name].shape:
            return False
    own = modules.get_submodule(paths[layer + _DOWN].removesuffix(_DOWN))
    return scale is None or scale == getattr(own, "lora_scale", None)
