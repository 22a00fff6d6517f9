"""The update of a step: one factor for all gradients, clipping, and the step, unless something was not finite.

Backward has run on sums. Their divisor is known only on the device, and only after every rank has contributed, so the
gradients are multiplied once, right before the update, by

    1 / count over all ranks and micro-batches  x  1 / loss scale (fp16)  x  clip factor

of which the caller gives the first two. Nothing waits for the device, unless an optimizer can't skip a step by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from sbkit.nn.device_numbers import DeviceNumbers
from sbkit.train import update_kernels


def update(optimizers: Sequence[Optimizer], factor: torch.Tensor, max_norm: float | None,
           finite: torch.Tensor | None = None, rates: Sequence[Sequence[torch.Tensor] | None] = (),
           ) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply all gradients by ``factor``, clip those of each optimizer, and step, unless something is not finite.

    factor, finite : scalars on the device; ``finite`` is False if the step is to be skipped in any case, because its
        loss is not finite or counts nothing
    rates : what ``write_rates`` returned

    Returns the norm of the gradients before clipping, and 1 if the step was skipped, else 0; both on the device. Fused
    optimizers skip a step on the device. For others the host reads once whether to: this costs nothing on the CPU, and
    is the step's only wait on a GPU.
    """
    # A single fused optimizer is left to divide while it reads the gradients, which saves a pass over them.
    divides_itself = len(optimizers) == 1 and skips_itself(optimizers[0])
    divisor: torch.Tensor | None = None
    norms: list[torch.Tensor] = []
    seen: set[int] = set()
    for optimizer in optimizers:
        grads = [grad for grad in gradients([optimizer]) if id(grad) not in seen]  # one of two optimizers counts once
        seen.update(map(id, grads))
        norm_of_optimizer = _norm_of(grads, factor.device) * factor
        norms.append(norm_of_optimizer)
        scale = _clipped(factor, norm_of_optimizer, max_norm)
        if divides_itself:
            divisor = 1 / scale
        elif grads:
            torch._foreach_mul_(grads, scale)

    norm = torch.zeros_like(factor)  # if all optimizers are frozen
    if norms:
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    all_finite = torch.isfinite(norm) if finite is None else torch.isfinite(norm) & finite
    skipped = (~all_finite).float()

    skips: bool | None = None  # what the host has read of ``skipped``, if it had to
    for optimizer, rates_on_device in zip(optimizers, rates or [None] * len(optimizers), strict=True):
        if skips_itself(optimizer):
            _step_on_device(optimizer, divisor, skipped, rates_on_device)
            continue
        if skips is None:
            skips = bool(skipped > 0)
        if not skips:
            optimizer.step()
    return norm, skipped


def _clipped(factor: torch.Tensor, norm: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    """Return what to multiply gradients by, so that their norm, which is ``norm`` with ``factor``, is not too large."""
    if max_norm is not None and max_norm > 0:
        return factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
    return factor


def _norm_of(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the norm of all gradients as one vector."""
    if not grads:
        return torch.zeros((), device=device)
    if device.type == "cpu" and update_kernels.available() and update_kernels.fit(grads):
        return torch.tensor(update_kernels.norm(grads), dtype=torch.float32)
    norm = torch.nn.utils.get_total_norm(grads, norm_type=2.0, error_if_nonfinite=False)
    if hasattr(norm, "full_tensor"):  # sharded parameters: the norm over all shards
        norm = norm.full_tensor()
    return norm.to(device=device, dtype=torch.float32)


def _step_on_device(optimizer: Optimizer, divisor: torch.Tensor | None, skipped: torch.Tensor,
                    rates: Sequence[torch.Tensor] | None) -> None:
    """Let a fused optimizer step, unless ``skipped`` is 1, with gradients divided by ``divisor``.

    rates : of its groups, on the device, for kernels; hooks and schedules know them as numbers. None: those
    """
    fused: Any = optimizer  # two attributes that only fused optimizers read
    fused.grad_scale, fused.found_inf = divisor, skipped
    numbers = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates or numbers, strict=True):
        group["lr"] = rate
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            group["lr"] = number


def write_rates(optimizers: Sequence[Optimizer], device: torch.device) -> list[Sequence[torch.Tensor] | None]:
    """Write the learning rates of groups to the device; return each optimizer's tensors, None if it has its own.

    Called after all hooks that may change a rate, and outside of what can be captured.
    """
    on_device: list[Sequence[torch.Tensor] | None] = []
    for optimizer in optimizers:
        rates = [group["lr"] for group in optimizer.param_groups]
        if not skips_itself(optimizer) or any(isinstance(rate, torch.Tensor) for rate in rates):
            on_device.append(None)
            continue
        numbers: DeviceNumbers | None = vars(optimizer).get("device_rates")
        if numbers is None or len(numbers.numbers) != len(rates):  # a recipe may add groups
            numbers = DeviceNumbers(rates, torch.float64 if device.type == "cpu" else torch.float32)
            vars(optimizer)["device_rates"] = numbers
        numbers.write(rates)
        on_device.append(numbers.on(device))
    return on_device


def skips_itself(optimizer: Optimizer) -> bool:
    """Return whether the optimizer checks ``found_inf`` on the device."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused") for group in optimizer.param_groups)


def gradients(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Return every gradient once, in a fixed order."""
    by_parameter: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_parameter[id(parameter)] = parameter.grad
    return list(by_parameter.values())
