"""The optimizer Muon for the matrices of layers, and AdamW for everything else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

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

    # ------------------------------------------------------------ matrices

    def _turns(self, group: Mapping[str, Any]) -> list[tuple[torch.Tensor, bool]]:
        """Return the matrices of a group that have a gradient, each with whether this step orthogonalises it.

        With ``orthogonalize_every`` 3, the first step is due for all matrices, and then turn + place decides:

            turn          0    1    2    3    4    5
            first         due            due
            second        due       due            due
            third         due  due            due
        """
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
        matrices = self._matrices_with_gradients(group)
        if not matrices.weights:
            return
        _count_turns(matrices)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and in_host_memory(found_inf):  # then it is read at no cost
            if found_inf > 0:
                return
            found_inf = None
        if _have_kernels(matrices.weights, matrices.grads, matrices.momenta, matrices.directions or []):
            self._update_matrices_by_kernels(group, matrices)
        else:
            self._update_matrices_by_torch(group, matrices, found_inf)

    def _matrices_with_gradients(self, group: Mapping[str, Any]) -> _Matrices:
        """Return the matrices of a group that have a gradient, with their states; new states are made."""
        turns = self._turns(group)
        weights = [weight for weight, _ in turns]
        # A direction is stored only for the steps until a matrix has its turn again.
        stores_directions = group["orthogonalize_every"] > 1
        states = self._matrix_states(weights, stores_directions)
        return _Matrices(
            weights=weights,
            grads=[weight.grad for weight in weights if weight.grad is not None],  # all have one, see ``_turns``
            states=states,
            momenta=[state["momentum"] for state in states],
            directions=[state["direction"] for state in states] if stores_directions else None,
            is_due=[is_due for _, is_due in turns])

    def _update_matrices_by_kernels(self, group: Mapping[str, Any], matrices: _Matrices) -> None:
        """Update matrices by kernels, one before orthogonalising and one after it."""
        shapes = [(weight.shape[0], weight.shape[1:].numel()) for weight in matrices.weights]
        due_shapes = [shape if is_due else None for shape, is_due in zip(shapes, matrices.is_due, strict=True)]
        dtype = dtype_of_products(matrices.weights[0].device)
        stacks = Stacks(due_shapes, dtype)
        update_kernels.move_momenta(
            matrices.grads,
            matrices.momenta,
            ahead=stacks.parts,
            dtype=dtype,
            divisor=self._divisor(),
            momentum=group["momentum"],
            tiny=TINY,
        )
        updates = stacks.orthogonalised()
        rate = float(group["lr"])
        update_kernels.move_weights(
            matrices.weights,
            updates,
            factors=stacks.factors,
            directions=matrices.directions or [None] * len(matrices.weights),
            dtype=stacks.result_dtype,
            keep=1 - rate * group["weight_decay"],
            step=-rate * group["update_rms"],
        )

    def _update_matrices_by_torch(self, group: Mapping[str, Any], matrices: _Matrices,
                                  found_inf: torch.Tensor | None) -> None:
        """Update matrices by torch's operations on lists.

        found_inf : on a GPU, 1 if the step is to be skipped; the host doesn't read it
        """
        gradients = self._scaled_gradients(matrices.grads, matrices.momenta, found_inf)
        torch._foreach_lerp_(matrices.momenta, gradients, 1 - group["momentum"])
        directions = self._directions(group, matrices, gradients, found_inf)

        # The factor is 0 if the step is skipped. A rate in a tensor has fp64 on a CPU, so that its products are rounded
        # as those of a number.
        device = matrices.weights[0].device
        factor = torch.ones((), device=device) if found_inf is None else 1 - found_inf
        decay = (factor * (group["lr"] * group["weight_decay"])).to(factor.dtype)
        step_size = (factor * (group["lr"] * -group["update_rms"])).to(factor.dtype)
        torch._foreach_mul_(matrices.weights, 1 - decay)
        if step_size.device.type == "cpu":  # rounds once
            torch._foreach_addcmul_(matrices.weights, directions, [step_size] * len(matrices.weights))
        else:  # a list of factors would launch a kernel for each weight
            torch._foreach_add_(matrices.weights, torch._foreach_mul(directions, step_size))

    def _directions(self, group: Mapping[str, Any], matrices: _Matrices, gradients: Sequence[torch.Tensor],
                    found_inf: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the directions of matrices: new ones for those that are due, and the stored ones of all others."""
        due_gradients = list(compress(gradients, matrices.is_due))
        due_momenta = list(compress(matrices.momenta, matrices.is_due))
        new_directions: list[torch.Tensor] = []
        if due_gradients:
            nesterov = torch._foreach_lerp(due_gradients, due_momenta, group["momentum"])
            new_directions = orthogonalise(nesterov)
        if matrices.directions is None:  # all are due in each step
            return new_directions
        if new_directions:
            _store(list(compress(matrices.directions, matrices.is_due)), new_directions, found_inf)
        return matrices.directions

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

    # ------------------------------------------------------------ all other parameters

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


class _Matrices(NamedTuple):
    """The matrices of a group that have a gradient in a step, and what belongs to each, in the same order."""

    weights: list[torch.Tensor]
    grads: list[torch.Tensor]
    states: list[dict[str, Any]]
    momenta: list[torch.Tensor]
    directions: list[torch.Tensor] | None
    """The stored ones; None if none are stored, since all matrices are due in each step."""
    is_due: list[bool]
    """Whether this step orthogonalises it."""


def _count_turns(matrices: _Matrices) -> None:
    """Count a step. The host counts skipped ones too, since it may not know of them."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return  # a capture computes nothing; ``count_step`` counts each replay
    for state in matrices.states:
        state["turn"] += 1


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
