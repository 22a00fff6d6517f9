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
    inner, given = unwrapped(opt_class)
    if not (isinstance(inner, type) and issubclass(inner, Optimizer)):
        return opt_class
    known = inspect.signature(inner).parameters
    if "fused" not in known or any(given.get(k) is not None for k in ("fused", "foreach")) \
            or given.get("capturable") or given.get("differentiable"):
        return opt_class

    def build(params: Iterable[Any]) -> Optimizer:
        params = list(params)
        try:
            # The tensors among parameters, named parameters or parameter groups.
            has_kernels = all(each.is_floating_point() and each.device.type in _FUSED_ON
                              for each in tree_leaves(params) if isinstance(each, torch.Tensor))
            optimizer = opt_class(params, fused=True) if has_kernels else None
        except RuntimeError:  # Adagrad's kernel is for the CPU only
            optimizer = None
        if optimizer is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return opt_class(params)
        return optimizer

    return build
