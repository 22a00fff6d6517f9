"""The optimizer Muon for the matrices of layers, and AdamW for everything else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from sbkit.errors import SbkitError
from sbkit.train import update_kernels
from sbkit.train.distributed import ranks
from sbkit.train.orthogonal import TINY, Stacks, dtype_of_products, orthogonalise

logger = logging.getLogger(__name__)

#: Layers whose weight is a matrix; a convolution's has a column for each input channel and tap.
_MATRIX_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
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
    # Skips what is not finite without the host, as torch's fused optimizers do (see sbkit/train/update.py).
    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[Any], modules: Sequence[nn.Module] = (), lr: float = 1e-3,
                 update_rms: float = 0.4, momentum: float = 0.95, orthogonalize_every: int = 1,
                 betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8, weight_decay: float = 0.01):
        for name, value in {"lr": lr, "update_rms": update_rms, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise SbkitError("bad-value", f"{name} is {value}, and must be at least 0", key=name, value=value)
        for name, value in {"momentum": momentum, **{f"betas[{i}]": beta for i, beta in enumerate(betas)}}.items():
            if not 0 <= value < 1:
                raise SbkitError("bad-value", f"{name} is {value}, and must be at least 0 and below 1",
                                 key=name, value=value)
        if isinstance(orthogonalize_every, bool) or not isinstance(orthogonalize_every, int) or orthogonalize_every < 1:
            raise SbkitError("bad-value",
                             f"orthogonalize_every is {orthogonalize_every}, and must be a whole number, 1 or more",
                             key="orthogonalize_every", value=orthogonalize_every)
        if not isinstance(modules, (list, tuple)) or not all(isinstance(module, nn.Module) for module in modules):
            raise SbkitError("bad-value", f"modules is {modules!r}, which is not a list of modules",
                             hint="list keys of the recipe: modules: [!ref <KEY>]", key="modules")
        self.matrices = _matrices_of(modules)
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
            self._update_matrices(group)
            self._update_others(group)
        return loss

    def graph_key(self) -> tuple[bool, ...]:
        """Return what decides, besides the groups' numbers, which kernels the next step has."""
        return tuple(is_due for group in self.param_groups for _, is_due in self._turns(group))

    def count_step(self) -> None:
        """Count a step that was captured as a CUDA graph, which was replayed."""
        for group in self.param_groups:
            for matrix, _ in self._turns(group):
                self.state[matrix]["turn"] += 1

    def _turns(self, group: Mapping[str, Any]) -> list[tuple[torch.Tensor, bool]]:
        """Return the matrices of a group that have a gradient, each with whether this step orthogonalises it."""
        every = group["orthogonalize_every"]
        matrices = [parameter for parameter in group["params"] if id(parameter) in self.matrices]
        turns = []
        for place, matrix in enumerate(matrices):
            if matrix.grad is None:
                continue
            state = self.state[matrix]
            # Without a direction of an earlier step to follow, a matrix is due at once.
            turn = state.get("turn", 0) if every == 1 or "direction" in state else 0
            turns.append((matrix, turn == 0 or (turn + place) % every == 0))
        return turns

    def _update_matrices(self, group: Mapping[str, Any]) -> None:
        """Update the matrices of a group that have a gradient."""
        turns = self._turns(group)
        if not turns:
            return
        weights = [weight for weight, _ in turns]
        due = [is_due for _, is_due in turns]
        # A direction is stored only for the steps until a matrix has its turn again.
        stores_directions = group["orthogonalize_every"] > 1
        states = self._matrix_states(weights, stores_directions)
        is_capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if not is_capturing:  # a capture computes nothing; ``count_step`` counts each replay
            for state in states:  # counted by the host, which doesn't know of skipped steps
                state["turn"] += 1

        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and in_host_memory(found_inf):  # then it is read at no cost
            if found_inf > 0:
                return
            found_inf = None
        momenta = [state["momentum"] for state in states]
        grads = [weight.grad for weight in weights if weight.grad is not None]  # all have one, see ``_turns``
        stored = [state["direction"] for state in states] if stores_directions else []
        if _have_kernels(weights, grads, momenta, stored):
            self._update_in_two_passes(group, weights, grads, states, due)
            return
        updates = self._scaled_gradients(grads, momenta, found_inf)
        torch._foreach_lerp_(momenta, updates, 1 - group["momentum"])

        due_updates = [update for update, is_due in zip(updates, due, strict=True) if is_due]
        due_momenta = [momentum for momentum, is_due in zip(momenta, due, strict=True) if is_due]
        directions: list[torch.Tensor] = []
        if due_updates:  # by Nesterov's momentum
            directions = orthogonalise(torch._foreach_lerp(due_updates, due_momenta, group["momentum"]))
        if stores_directions:
            due_stored = [state["direction"] for state, is_due in zip(states, due, strict=True) if is_due]
            if due_stored:
                _store(due_stored, directions, found_inf)
            directions = [state["direction"] for state in states]

        # The factor is 0 if the step is skipped. A rate in a tensor has fp64 on a CPU, so that its products are rounded
        # as those of a number.
        factor = torch.ones((), device=weights[0].device) if found_inf is None else 1 - found_inf
        decay = (factor * (group["lr"] * group["weight_decay"])).to(factor.dtype)
        step_size = (factor * (group["lr"] * -group["update_rms"])).to(factor.dtype)
        torch._foreach_mul_(weights, 1 - decay)
        if step_size.device.type == "cpu":  # rounds once
            torch._foreach_addcmul_(weights, directions, [step_size] * len(weights))
        else:  # a list of factors would launch a kernel for each weight
            torch._foreach_add_(weights, torch._foreach_mul(directions, step_size))

    def _update_in_two_passes(self, group: Mapping[str, Any], weights: Sequence[torch.Tensor],
                              grads: Sequence[torch.Tensor], states: Sequence[Mapping[str, Any]],
                              due: Sequence[bool]) -> None:
        """Update matrices by kernels, one before orthogonalising and one after it."""
        dtype = dtype_of_products(weights[0].device)
        stacks = Stacks([(weight.shape[0], weight.shape[1:].numel()) if is_due else None
                         for weight, is_due in zip(weights, due, strict=True)], dtype)
        update_kernels.move_momenta(grads, [state["momentum"] for state in states], stacks.parts, dtype,
                                    self._divisor(), group["momentum"], TINY)
        updates = stacks.orthogonalised()
        rate = float(group["lr"])
        update_kernels.move_weights(
            weights, updates, stacks.factors, [state.get("direction") for state in states], stacks.result_dtype,
            keep=1 - rate * group["weight_decay"], step=-rate * group["update_rms"])

    def _divisor(self) -> float:
        """Return what gradients are to be divided by."""
        grad_scale = getattr(self, "grad_scale", None)
        return 1.0 if grad_scale is None else float(grad_scale)

    def _scaled_gradients(self, grads: list[torch.Tensor], momenta: Sequence[torch.Tensor],
                          found_inf: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the gradients of matrices without the loss scale; of a skipped step, the momenta in their place, so
        that momenta don't change."""
        grad_scale = getattr(self, "grad_scale", None)
        if in_host_memory(grads[0]):  # a list takes as long there as one tensor, and a copy takes longer
            return grads if grad_scale is None else list(torch._foreach_div(grads, grad_scale))

        # On a GPU each tensor is a kernel to launch, so they are one.
        flat = torch.cat([grad.flatten() for grad in grads])
        if grad_scale is not None:
            flat.div_(grad_scale)
        if found_inf is not None:
            flat = torch.where(found_inf > 0, _flatten_dense_tensors(momenta), flat)
        return list(_unflatten_dense_tensors(flat, grads))

    def _update_others(self, group: Mapping[str, Any]) -> None:
        """Update the parameters of a group that are no matrices and have a gradient, as AdamW does."""
        parameters = [parameter for parameter in group["params"]
                      if id(parameter) not in self.matrices and parameter.grad is not None]
        if not parameters:
            return
        states = self._adamw_states(parameters)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        found_inf = getattr(self, "found_inf", None)
        if _have_kernels(parameters, grads, *(state.values() for state in states)):
            if found_inf is None or not found_inf > 0:
                update_kernels.adamw(parameters, states, grads, self._divisor(), float(group["lr"]), group["betas"],
                                     group["weight_decay"], group["eps"])
            return
        beta1, beta2 = group["betas"]
        adamw(parameters, grads,
              exp_avgs=[state["exp_avg"] for state in states],
              exp_avg_sqs=[state["exp_avg_sq"] for state in states],
              max_exp_avg_sqs=[], state_steps=[state["step"] for state in states], fused=True, amsgrad=False,
              beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
              maximize=False, grad_scale=getattr(self, "grad_scale", None), found_inf=found_inf)

    def _matrix_states(self, weights: Sequence[torch.Tensor], stores_directions: bool) -> list[dict[str, Any]]:
        """Return the states of matrices, with what they lack at its first value."""
        states: list[dict[str, Any]] = [self.state[weight] for weight in weights]
        for weight, state in zip(weights, states, strict=True):
            if "momentum" not in state:  # new, or of another optimizer
                state.clear()
            if "turn" not in state or (stores_directions and "direction" not in state):
                state["turn"] = 0  # it is due now
            if not stores_directions:
                state.pop("direction", None)
            for name in ("momentum", "direction") if stores_directions else ("momentum",):
                if name not in state:
                    state[name] = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        return states

    def _adamw_states(self, parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """Return the states of parameters that AdamW updates, with what they lack at its first value."""
        states: list[dict[str, Any]] = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not {"exp_avg", "exp_avg_sq"} <= state.keys():  # new, or of another optimizer
                state.clear()
            if "step" not in state:
                state["step"] = torch.zeros((), device=parameter.device)
            state.pop("direction", None)
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        return states


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether the host computes on a tensor itself, so that it can read values without waiting, and launches nothing.
    """
    return tensor.device.type == "cpu"


def _have_kernels(weights: Sequence[torch.Tensor], *others: Iterable[torch.Tensor]) -> bool:
    """Whether there are kernels for weights and the other tensors of their update."""
    return in_host_memory(weights[0]) and update_kernels.available() and update_kernels.fit(weights, *others)


def _matrices_of(modules: Sequence[nn.Module]) -> set[int]:
    """Return the ids of the matrices in modules that Muon updates."""
    layers = [layer for module in modules for layer in module.modules()]
    matrices: set[int] = set()
    embeddings: set[int] = set()
    for layer in layers:
        has_matrix = isinstance(layer, _MATRIX_LAYERS) and getattr(layer, "groups", 1) == 1
        for name, parameter in layer.named_parameters(recurse=False):
            if name == "in_proj_weight" or (name == "weight" and has_matrix):
                matrices.add(id(parameter))
            elif isinstance(layer, nn.Embedding):
                embeddings.add(id(parameter))
    if not matrices:
        kinds = dict.fromkeys(type(layer).__name__ for layer in layers
                              if next(layer.parameters(recurse=False), None) is not None)
        listed = f" ({', '.join(kinds)})" if kinds else ""
        raise SbkitError(
            "nothing-for-muon",
            f"modules holds no layer whose weight Muon updates{listed}, so Muon would be the same as AdamW",
            hint="take AdamW, opt_class: !name:torch.optim.AdamW {lr: !ref <lr>}; or name modules with linear "
                 "layers, attention or ungrouped convolutions, but not the output layer")
    return matrices - embeddings  # an output layer may share the matrix of an embedding


def _store(stored: list[torch.Tensor], directions: list[torch.Tensor], found_inf: torch.Tensor | None) -> None:
    """Overwrite stored directions with new ones, unless the step is skipped."""
    if found_inf is not None:
        flat = torch.where(found_inf > 0, _flatten_dense_tensors(stored), _flatten_dense_tensors(directions))
        directions = list(_unflatten_dense_tensors(flat, stored))
    torch._foreach_copy_(stored, directions)


def _with_defaults(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Give groups that were saved with another optimizer, or by an earlier version, the options that they lack."""
    if ranks.is_main() and any("momentum" not in saved for saved in state["param_groups"]):
        logger.warning("The checkpoint is from another optimizer, so Muon's momentum starts at 0")
    groups = []
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        renamed = {_GROUP_NAMES.get(name, name): value for name, value in saved.items()}
        groups.append({**group, **renamed})
    return {**state, "param_groups": groups}
