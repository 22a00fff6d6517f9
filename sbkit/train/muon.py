"""The optimizer Muon for the matrices of layers, and AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from sbkit.errors import SbkitError
from sbkit.train.device import native_precision

#: Layers whose weight multiplies vectors; of a convolution, vectors of all its taps.
_MULTIPLIES = (nn.Linear, nn.Conv1d, nn.Conv2d)
#: Of an iteration that brings singular values from 0.002 to 1 to between 0.65 and 1.25 in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(Optimizer):
    """Updates each matrix by its orthogonalised momentum (Muon), and all else as AdamW does.

    Every direction of a matrix then learns at the same rate, also those in which its gradient is small.

    Arguments
    ---------
    params : iterable
        Parameters, or groups of them.
    lr : float
        The learning rate, of all.
    of : Module, or sequence of them
        The modules whose matrices are meant: weights of linear layers, of attention and of convolutions over all
        channels. Layers that read or write tokens learn better with AdamW.
    strength : float
        The root mean square of a matrix's update, as a multiple of the rate.
    momentum : float
        The share of a matrix's momentum that stays in a step.
    every : int
        The momentum of a matrix is orthogonalised in one of so many steps, and of others in turn. 1 learns most from
        each step, and on a GPU costs little; on a CPU, 4 takes a quarter of the time.
    betas, eps, weight_decay : tuple, float, float
        As of ``torch.optim.AdamW``; matrices have its ``weight_decay`` too.
    """

    # Skips what is not finite without the host, as torch's fused optimizers do (see sbkit.train.optim).
    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, of: nn.Module | Sequence[nn.Module] = (),
                 strength: float = 0.4, momentum: float = 0.95, every: int = 1,
                 betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8, weight_decay: float = 0.01):
        if not (isinstance(every, int) and every >= 1):
            raise SbkitError(f"every is {every}, and must be a whole number, 1 or more")
        if not 0 <= momentum < 1:
            raise SbkitError(f"momentum is {momentum}, and must be at least 0 and below 1")
        modules = [of] if isinstance(of, nn.Module) else list(of)
        for module in modules:
            if not isinstance(module, nn.Module):
                raise SbkitError(f"of has {module!r}, which is no module", hint="write of: [!ref <Transformer>]")
        super().__init__(params, {"lr": lr, "strength": strength, "momentum": momentum, "every": every, "turn": 0,
                                  "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "fused": True})
        self._matrices = {id(weight) for module in modules for weight in _weights(module)}
        self.register_load_state_dict_pre_hook(_with_defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._orthogonally([each for each in moving if id(each) in self._matrices], group)
            self._by_element([each for each in moving if id(each) not in self._matrices], group)
        return loss

    def _orthogonally(self, weights: list[torch.Tensor], group: dict[str, Any]) -> None:
        if not weights:
            return
        turn, every = group["turn"], group["every"]
        group["turn"] = turn + 1
        due = [not self.state[weight] or (turn + place) % every == 0 for place, weight in enumerate(weights)]
        states = [self._state(weight, "momentum", "direction") for weight in weights]
        momenta, directions = ([state[name] for state in states] for name in ("momentum", "direction"))
        found, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        grads = _gradients(weights)
        if divisor is not None:
            grads = list(torch._foreach_div(grads, divisor))
        if found is not None:  # a momentum stays what it is with itself as gradient
            grads = [torch.where(found > 0, own, grad) for own, grad in zip(momenta, grads, strict=True)]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        keep = torch.ones((), device=weights[0].device) if found is None else 1 - found
        orthogonalise([(torch.lerp(grad, own, group["momentum"]), direction)
                       for now, grad, own, direction in zip(due, grads, momenta, directions, strict=True) if now], keep)
        torch._foreach_mul_(weights, 1 - keep * (group["lr"] * group["weight_decay"]))
        torch._foreach_addcmul_(weights, directions, [keep * (-group["lr"] * group["strength"])] * len(weights))

    def _by_element(self, parameters: list[torch.Tensor], group: Mapping[str, Any]) -> None:
        if not parameters:
            return
        states = [self._state(parameter, "exp_avg", "exp_avg_sq") for parameter in parameters]
        averages, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        adamw(parameters, _gradients(parameters), averages, squares, [], steps, fused=True, amsgrad=False,
              beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
              maximize=False, grad_scale=getattr(self, "grad_scale", None), found_inf=getattr(self, "found_inf", None))

    def _state(self, parameter: torch.Tensor, *names: str) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not all(name in state for name in names):  # new, or of another optimizer
            state.clear()
            state.update((name, torch.zeros_like(parameter)) for name in names)
            if "exp_avg" in names:
                state["step"] = torch.zeros((), device=parameter.device)
        return state


def _with_defaults(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Give groups that another optimizer saved what they lack."""
    return {**state, "param_groups": [{**optimizer.defaults, **group, "fused": True}
                                      for group in state["param_groups"]]}


def _weights(module: nn.Module) -> Iterable[nn.Parameter]:
    """Yield the weights, of a module and of those within it, that multiply vectors."""
    for part in module.modules():
        whole = isinstance(part, _MULTIPLIES) and getattr(part, "groups", 1) == 1
        for name, parameter in part.named_parameters(recurse=False):
            if name == "in_proj_weight" or (name == "weight" and whole):
                yield parameter


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _lying(weight: torch.Tensor) -> Iterable[torch.Tensor]:
    """Yield the matrices in a weight as views, none higher than wide; three square ones are attention's."""
    matrix = weight.flatten(1)
    for each in matrix.chunk(3 if matrix.shape[0] == 3 * matrix.shape[1] else 1):
        yield each.T if each.shape[0] > each.shape[1] else each


def orthogonalise(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], keep: torch.Tensor) -> None:
    """Write what orthogonalising the first weight of each pair gives into the second one, if ``keep`` is 1.

    It is scaled to a root mean square of 1. Matrices of one size are computed together.
    """
    alike: dict[tuple[torch.Size, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for first, second in pairs:
        for matrix, result in zip(_lying(first), _lying(second), strict=True):
            alike.setdefault((matrix.shape, matrix.device), []).append((matrix, result))
    for (shape, _), matrices in alike.items():
        found = newton_schulz(torch.stack([matrix for matrix, _ in matrices])).mul_(math.sqrt(shape[1]))
        for (_, result), new in zip(matrices, found, strict=True):
            result.lerp_(new, keep)


def newton_schulz(matrices: torch.Tensor) -> torch.Tensor:
    """Return lying matrices with their singular vectors, and values near 1 for their singular values.

    Computed in bfloat16 where the device is quick at that: the iteration corrects its own errors.
    """
    a, b, c = _COEFFICIENTS
    norms = torch.linalg.matrix_norm(matrices, keepdim=True).clamp_min(torch.finfo(matrices.dtype).tiny)
    quick = native_precision(matrices.device) == "bf16"
    found = (matrices / norms).to(torch.bfloat16 if quick else matrices.dtype)
    for _ in range(_ITERATIONS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.to(matrices.dtype)
