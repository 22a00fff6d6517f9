"""Optimizers in the implementation that can skip a step on the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from sbkit.recipe.values import unwrapped

# Devices with fused optimizers in the oldest supported torch.
_FUSED_ON = ("cpu", "cuda", "xpu", "mps")


def fused(opt_class: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Return the optimizer in its fused implementation, if it has one that can skip a step on the device.

    ``opt_class`` is a class or a partial (``!name:torch.optim.AdamW``), as for SpeechBrain's Brain. If the user set
    ``fused``, ``foreach``, ``capturable`` or ``differentiable``, it is returned unchanged.
    """
    inner, options = unwrapped(opt_class)
    if not (isinstance(inner, type) and issubclass(inner, Optimizer)):
        return opt_class
    if "fused" not in inspect.signature(inner).parameters:
        return opt_class
    chose_foreach = options.get("fused") is not None or options.get("foreach") is not None
    if chose_foreach or options.get("capturable") or options.get("differentiable"):
        return opt_class

    def build(params: Iterable[Any]) -> Optimizer:
        params = list(params)
        try:
            # The tensors among parameters, named parameters or parameter groups.
            tensors = [leaf for leaf in tree_leaves(params) if isinstance(leaf, torch.Tensor)]
            has_kernels = all(tensor.is_floating_point() and tensor.device.type in _FUSED_ON for tensor in tensors)
            optimizer = opt_class(params, fused=True) if has_kernels else None
        except RuntimeError:  # Adagrad's kernel is for the CPU only
            optimizer = None
        if optimizer is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return opt_class(params)
        return optimizer

    return build
