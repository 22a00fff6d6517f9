"""The optimizer Muon for the matrices of layers, and AdamW for everything else."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from sbkit.errors import SbkitError
from sbkit.recipe.speed import native_precision
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

#: Layers whose weight is a matrix; a convolution's has a column for each input channel and tap.
_MULTIPLIES = (nn.Linear, nn.Conv1d, nn.Conv2d)
#: Coefficients of an iteration that takes singular values in [0.002, 1] to [0.65, 1.25] in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
#: A matrix without a larger element goes to 0.
_TINY = 1e-30
#: Names that options of groups have in checkpoints of earlier versions.
_GROUP_NAMES = {"strength": "update_rms", "every": "orthogonalize_every"}


class Muon(Optimizer):
    """Updates each matrix by its orthogonalised momentum (Muon), and everything else as AdamW does.

    Every direction of a matrix then learns at the same rate, also those in which its gradient is small. Ranks share the
    work: each orthogonalises some of the matrices for all.

    params : iterable
        Parameters, or groups of them.
    modules : sequence of Module
        The modules whose matrices learn by Muon: weights of linear layers, of attention and of convolutions over all
        channels. Leave out output layers over tokens; embeddings are always left out.
    lr : float
        The learning rate of all parameters.
    update_rms : float
        The root mean square of a matrix's update, as a multiple of the rate.
    momentum : float
        The share of a matrix's momentum that stays in a step.
    orthogonalize_every : int
        The momentum of a matrix is orthogonalised once in this many steps; matrices take turns. 1 learns most from
        each step, and on a GPU costs little; on a CPU, 4 takes a quarter of the time.
    betas, eps, weight_decay : tuple, float, float
        As of ``torch.optim.AdamW``; matrices have its ``weight_decay`` too.
    """

    #: A rank can't orthogonalise a matrix of which it has only a part.
    needs_whole_parameters = True
    # Skips what is not finite without the host, as torch's fused optimizers do (see sbkit.train.optim).
    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[Any], modules: Sequence[nn.Module] = (), lr: float = 1e-3,
                 update_rms: float = 0.4, momentum: float = 0.95, orthogonalize_every: int = 1,
                 betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8, weight_decay: float = 0.01):
        shares = {"momentum": momentum, **{f"betas[{i}]": beta for i, beta in enumerate(betas)}}
        for name, value in {"lr": lr, "update_rms": update_rms, "eps": eps, "weight_decay": weight_decay,
                            **shares}.items():
            if not value >= 0 or (name in shares and value >= 1):
                raise SbkitError(f"{name} is {value}, and must be at least 0{' and below 1' if name in shares else ''}")
        if isinstance(orthogonalize_every, bool) or not isinstance(orthogonalize_every, int) or orthogonalize_every < 1:
            raise SbkitError(f"orthogonalize_every is {orthogonalize_every}, and must be a whole number, 1 or more")
        if not isinstance(modules, (list, tuple)) or not all(isinstance(module, nn.Module) for module in modules):
            raise SbkitError(f"modules is {modules!r}, which is not a list of modules",
                             hint="list keys of the recipe: modules: [!ref <KEY>]")
        found, embeddings = set(), set()
        for part in (part for module in modules for part in module.modules()):
            whole = isinstance(part, _MULTIPLIES) and getattr(part, "groups", 1) == 1
            for name, parameter in part.named_parameters(recurse=False):
                if name == "in_proj_weight" or (name == "weight" and whole):
                    found.add(id(parameter))
                elif isinstance(part, nn.Embedding):
                    embeddings.add(id(parameter))
        if not found:
            layers = {type(part).__name__: None for module in modules for part in module.modules()
                      if next(part.parameters(recurse=False), None) is not None}
            held = f" ({', '.join(layers)})" if layers else ""
            raise SbkitError(
                f"modules holds no layer whose weight Muon updates{held}, so Muon would be the same as AdamW",
                hint="take AdamW, opt_class: !name:torch.optim.AdamW {lr: !ref <lr>}; or name modules with linear "
                     "layers, attention or ungrouped convolutions, but not the output layer")
        self.matrices = found - embeddings
        """The ids of the parameters that Muon updates; AdamW updates the rest."""
        super().__init__(params, {
            "lr": lr, "update_rms": update_rms, "momentum": momentum, "orthogonalize_every": orthogonalize_every,
            "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "fused": True})
        self.register_load_state_dict_pre_hook(_with_defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update_matrices(self._turns(group), group)
            others = [each for each in group["params"] if id(each) not in self.matrices and each.grad is not None]
            if not others:
                continue
            states = self._states(others, "exp_avg", "exp_avg_sq")
            averages, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
            beta1, beta2 = group["betas"]
            grads = [each.grad for each in others if each.grad is not None]
            adamw(others, grads, averages, squares, [], steps, fused=True, amsgrad=False,
                  beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                  maximize=False, grad_scale=getattr(self, "grad_scale", None),
                  found_inf=getattr(self, "found_inf", None))
        return loss

    def _turns(self, group: Mapping[str, Any]) -> list[tuple[torch.Tensor, bool]]:
        """Return the matrices of a group that have a gradient, each with whether this step orthogonalises it."""
        matrices = [parameter for parameter in group["params"] if id(parameter) in self.matrices]
        states = [self.state[each] if each.grad is not None else {} for each in matrices]
        every = group["orthogonalize_every"]
        turns = [state.get("turn", 0) if every == 1 or "direction" in state else 0 for state in states]
        return [(each, turn == 0 or (turn + place) % every == 0)
                for place, (each, turn) in enumerate(zip(matrices, turns, strict=True)) if each.grad is not None]

    def graph_key(self) -> tuple[bool, ...]:
        """Return what decides, besides the groups' numbers, which kernels the next step has."""
        return tuple(due for group in self.param_groups for _, due in self._turns(group))

    def count_step(self) -> None:
        """Count a step that was captured as a CUDA graph, which was replayed."""
        for group in self.param_groups:
            for parameter, _ in self._turns(group):
                self.state[parameter]["turn"] += 1

    def _update_matrices(self, turns: Sequence[tuple[torch.Tensor, bool]], group: Mapping[str, Any]) -> None:
        if not turns:
            return
        weights, due = map(list, zip(*turns, strict=True))
        # A direction is kept only for the steps until a matrix has its turn again.
        states = self._states(weights, "momentum", *(["direction"] if group["orthogonalize_every"] > 1 else []))
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):  # which computes nothing
            for state in states:  # counted by the host, which doesn't know of skipped steps
                state["turn"] += 1
        momenta = [state["momentum"] for state in states]
        found, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        # A copy, which may be overwritten; all have a gradient (see _turns).
        grads = torch.cat([weight.grad.flatten() for weight in weights])
        if divisor is not None:
            grads.div_(divisor)
        if found is not None:  # with itself as gradient, the momentum does not change
            grads = torch.where(found > 0, _flatten_dense_tensors(momenta), grads)
        updates = _unflatten_dense_tensors(grads, weights)
        torch._foreach_lerp_(momenta, updates, 1 - group["momentum"])
        keep = torch.ones((), device=weights[0].device) if found is None else 1 - found
        updates, now = ([each for each, is_due in zip(tensors, due, strict=True) if is_due]
                        for tensors in (updates, momenta))
        directions: list[torch.Tensor] = []
        if updates:
            torch._foreach_lerp_(updates, now, group["momentum"])
            directions = orthogonalise(updates)
        if group["orthogonalize_every"] > 1:
            kept = [state["direction"] for state, is_due in zip(states, due, strict=True) if is_due]
            if kept and found is not None:
                flat = torch.where(found > 0, _flatten_dense_tensors(kept), _flatten_dense_tensors(directions))
                directions = list(_unflatten_dense_tensors(flat, kept))
            if kept:
                torch._foreach_copy_(kept, directions)
            directions = [state["direction"] for state in states]
        # A rate in a tensor has fp64 on a CPU, so that its products are rounded as those of a number.
        decay, step = ((keep * (group["lr"] * share)).to(keep.dtype)
                       for share in (group["weight_decay"], -group["update_rms"]))
        torch._foreach_mul_(weights, 1 - decay)
        if step.device.type == "cpu":  # rounds once
            torch._foreach_addcmul_(weights, directions, [step] * len(weights))
        else:  # a list of factors would launch a kernel for each weight
            torch._foreach_add_(weights, torch._foreach_mul(directions, step))

    def _states(self, parameters: Sequence[torch.Tensor], *names: str) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not set(names) - {"direction"} <= state.keys():  # new, or of another optimizer
                state.clear()
            if "momentum" in names and ("turn" not in state or ("direction" in names) > ("direction" in state)):
                state["turn"] = 0  # its turn is now
            elif "exp_avg" in names and "step" not in state:
                state["step"] = torch.zeros((), device=parameter.device)
            if "direction" not in names:
                state.pop("direction", None)
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        return states


def _with_defaults(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Give groups that were saved with another optimizer, or by an earlier version, the options that they lack."""
    if ranks.is_main() and any("momentum" not in saved for saved in state["param_groups"]):
        logger.warning("The checkpoint is from another optimizer, so Muon's momentum starts at 0")
    groups = [{**own, **{_GROUP_NAMES.get(name, name): value for name, value in saved.items()}}
              for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)]
    return {**state, "param_groups": groups}


def orthogonalise(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return weights orthogonalised, and scaled to a root mean square of 1.

    Matrices of one size, wide or tall, are computed together. Each is computed by one rank, so that all ranks get the
    same bits even on different processors.
    """
    shapes: dict[torch.Size, list[int]] = {}
    for index, weight in enumerate(weights):
        shapes.setdefault(weight.shape, []).append(index)
    sizes: dict[tuple[int, ...], list[torch.Size]] = {}
    for shape in shapes:
        sizes.setdefault(tuple(sorted((shape[0], shape[1:].numel()))), []).append(shape)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    before, results = 0, list(weights)
    for (low, width), alike in sizes.items():
        stacks = [torch.stack([weights[index] for index in shapes[shape]]).flatten(2) for shape in alike]
        wide = [each.mT if each.shape[1] > each.shape[2] else each for each in stacks]  # at least as wide as high
        matrices = torch.cat(wide) if len(wide) > 1 else wide[0].contiguous()
        own = slice((rank - before) % world, None, world)
        before += len(matrices)
        found = newton_schulz(matrices[own])
        if world > 1:
            shared = torch.zeros_like(matrices)
            shared[own] = found
            found = ranks.sum_across(shared)
        found.mul_(math.sqrt(width))
        for shape, part in zip(alike, found.split([len(shapes[shape]) for shape in alike]), strict=True):
            part = part.mT.contiguous() if shape[0] > low else part
            for index, each in zip(shapes[shape], part.view(-1, *shape), strict=True):
                results[index] = each
    return results


def newton_schulz(matrices: torch.Tensor) -> torch.Tensor:
    """Return wide matrices with their singular vectors, and values near 1 for their singular values.

    Computed in bfloat16 if the device is fast at that: the iteration corrects its own errors.
    """
    a, b, c = _COEFFICIENTS
    found = matrices / matrices.abs().amax((-2, -1), keepdim=True).clamp_min(_TINY)  # so that no square underflows
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp_min(1)
    if native_precision(matrices.device) == "bf16":
        found = found.to(torch.bfloat16)
    for _ in range(_ITERATIONS):
        gram = torch.bmm(found, found.mT)
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.to(matrices.dtype)
