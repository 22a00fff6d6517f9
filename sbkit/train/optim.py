"""Updates that the optimizer itself can skip on the device, and the norm of all gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from sbkit.recipe.values import unwrapped

# Devices with fused optimizers in the oldest supported torch.
_FUSED_ON = ("cpu", "cuda", "xpu", "mps")


def apply(optimizers: Sequence[Optimizer], multiplier: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Multiply all gradients by ``multiplier`` and step, unless ``found_inf`` is 1; both are scalars on the device.

    A single fused optimizer multiplies while it reads the gradients. Fused optimizers check ``found_inf`` on the
    device. For others it is read here, once: this costs nothing on the CPU, and is the step's only host sync on a GPU.
    """
    divisor = 1 / multiplier if len(optimizers) == 1 and skips_itself(optimizers[0]) else None
    if divisor is None and (grads := gradients(optimizers)):
        torch._foreach_mul_(grads, multiplier)
    stop: bool | None = None
    for optimizer in optimizers:
        if skips_itself(optimizer):
            itself: Any = optimizer  # two attributes that only fused optimizers read
            itself.grad_scale, itself.found_inf = divisor, found_inf
            try:
                optimizer.step()
            finally:
                del itself.grad_scale, itself.found_inf
            continue
        if stop is None:
            stop = bool(found_inf > 0)
        if not stop:
            optimizer.step()


def skips_itself(optimizer: Optimizer) -> bool:
    """Return whether the optimizer checks ``found_inf`` on the device."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused") for group in optimizer.param_groups)


def total_norm(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the 2-norm of all gradients as one vector, a scalar on ``device``."""
    if not grads:
        return torch.zeros((), device=device)
    norm = torch.nn.utils.get_total_norm(grads, norm_type=2.0, error_if_nonfinite=False)
    if hasattr(norm, "full_tensor"):  # sharded parameters: the norm over all shards
        norm = norm.full_tensor()
    return norm.to(device=device, dtype=torch.float32)


def gradients(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Return every gradient once, in a fixed order."""
    found: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    found[id(parameter)] = parameter.grad
    return list(found.values())


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
            has_kernels = all(tensor.is_floating_point() and tensor.device.type in _FUSED_ON
                              for tensor in _tensors(params))
            optimizer = opt_class(params, fused=True) if has_kernels else None
        except RuntimeError:  # Adagrad's kernel is for the CPU only
            optimizer = None
        if optimizer is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return opt_class(params)
        return optimizer

    return build


def _tensors(params: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors among parameters, named parameters or parameter groups."""
    for entry in params:
        if isinstance(entry, dict):
            inner = entry["params"]
            yield from _tensors([inner] if isinstance(inner, torch.Tensor) else inner)
        else:
            yield entry[1] if isinstance(entry, tuple) else entry
