"""Averages of weights: over checkpoints, as ``sbkit/score/weights.py`` lists them, and a moving one during training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from speechbrain.utils import checkpoints as stock
from speechbrain.utils.checkpoints import (
    DEFAULT_SAVE_HOOKS,
    Checkpoint,
    get_default_hook,
    hook_on_loading_state_dict_checkpoint,
)

from sbkit.errors import SbkitError
from sbkit.nn.device_numbers import DeviceNumbers
from sbkit.score.weights import Average
from sbkit.train.checkpoint.files import damage
from sbkit.train.checkpoint.hooks import TENSORS
from sbkit.train.checkpoint.state import differences, load_file
from sbkit.train.distributed import sharding

logger = logging.getLogger(__name__)


def averaged_state(
    checkpointer: stock.Checkpointer, recoverable: str, average: Average, min_key: str | None = None,
    max_key: str | None = None,
) -> tuple[dict[str, Any], list[Checkpoint]]:
    """Average the state of a recoverable over the best checkpoints (without a key, the newest).

    Damaged checkpoints are skipped; if fewer are left than the average is of, all of them are used. Values that are not
    floating point (counters, masks) are those of the best checkpoint.

    Returns the state dict and the checkpoints in it, the best first.

    >>> state, used = averaged_state(checkpointer, "model", Mean(10), min_key="WER")  # doctest: +SKIP
    >>> model.load_state_dict(state)  # doctest: +SKIP
    """
    used: list[Checkpoint] = []
    states: list[Mapping[str, Any]] = []
    for ckpt in checkpointer.find_checkpoints(min_key=min_key, max_key=max_key):
        if len(used) == average.count:
            break
        path = ckpt.paramfiles.get(recoverable)
        reason = damage(Path(ckpt.path)) if path is not None else f"it has no state for {recoverable!r}"
        if reason is not None:
            logger.warning("Leaving %s out of the average: %s", ckpt.path, reason)
            continue
        # Lazily: of all checkpoints only one tensor at a time has to be in memory.
        state = weights_in(hook_on_loading_state_dict_checkpoint(load_file(path, lazily=True)))
        unlike = differences(states[0], state) if states else ""
        if unlike:
            raise SbkitError(f"{path} can't be averaged with {used[0].path}: {unlike}",
                             hint="are there checkpoints of two models in one folder?")
        used.append(ckpt)
        states.append(state)
    if not used:
        raise SbkitError(f"no checkpoint in {checkpointer.checkpoints_dir} holds {recoverable!r} to average")
    if len(used) < average.count:
        logger.warning("Averaging %d of %d requested checkpoints: there are no more to choose from", len(used),
                       average.count)

    combined: dict[str, Any] = {}
    for name, best in states[0].items():
        if _is_float(best):
            tensors = [state[name] for state in states]
            combined[name] = average.combine(tensors, used).to(best.dtype)
        else:
            combined[name] = best.clone() if isinstance(best, torch.Tensor) else best
    return combined, used


def load_average(
    checkpointer: stock.Checkpointer, average: Average, min_key: str | None = None, max_key: str | None = None,
) -> list[Checkpoint]:
    """Load into each recoverable that has weights their average over the best checkpoints; returns those.

    Everything else, such as a normaliser's statistics, does not change. See ``averaged_state``.
    """
    weights = weight_recoverables(checkpointer)
    if not weights:
        raise SbkitError("the checkpointer has no module among its recoverables, so there are no weights to average",
                         hint="add the model to recoverables")
    used: list[Checkpoint] = []
    for name, obj in sorted(weights.items(), key=lambda item: isinstance(item[1], EMA)):  # EMA overrides its module
        state, used = averaged_state(checkpointer, name, average, min_key, max_key)
        sharding.load_full_state(obj.module if isinstance(obj, EMA) else obj, state)
    return used


def weight_recoverables(checkpointer: stock.Checkpointer) -> dict[str, torch.nn.Module | EMA]:
    """Return the recoverables whose state is only weights: modules with a plain state dict, and averages."""
    own = {name for name, hook in checkpointer.custom_load_hooks.items() if hook is not sharding.load_full}
    return {name: obj for name, obj in checkpointer.recoverables.items()
            if isinstance(obj, EMA) or (isinstance(obj, torch.nn.Module) and name not in own
                                        and get_default_hook(obj, DEFAULT_SAVE_HOOKS) in TENSORS)}


def weights_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's state dict from the state of a model or of an ``EMA``."""
    return state["weights"] if set(state) == {"weights", "updates", "decay"} else state


def _is_float(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class EMA:
    """An exponential moving average of a module's parameters, kept on their device and in checkpoints.

        ema = EMA(model, decay=0.999)
        checkpointer.add_recoverable("ema", ema, optional_load=True)
        ...
        ema.update()              # after each optimizer step; does not wait for the device
        with ema.swapped():       # evaluate with the averages
            ...

    module : torch.nn.Module
        The module with the parameters to average; buffers are not averaged.
    decay : float
        The weight of the previous average; after ``u`` updates it is at most (1 + u) / (10 + u).
    """

    def __init__(self, module: torch.nn.Module, decay: float = 0.999):
        if not 0.0 <= decay < 1.0:
            raise SbkitError(f"the decay of an average must be in [0, 1), not {decay}", hint="0.999 is usual")
        self.module, self.decay, self.updates = module, decay, 0
        self._averages: dict[str, torch.Tensor] = {}  # empty until the first update
        self._weight = DeviceNumbers([1.0])  # of the present parameters
        self._swapped = False

    def weight(self, updates: int) -> float:
        """Return the weight of the present parameters in the next average, after so many updates.

        Another moving average derives from this class and overrides this.
        """
        return 1.0 - min(self.decay, (1 + updates) / (10 + updates))

    def count_update(self) -> None:
        """Count an update, and write its weight to the device; called before an ``update`` with ``skipped``."""
        self._weight.write([self.weight(self.updates)])
        self.updates += 1

    @torch.no_grad()
    def update(self, skipped: torch.Tensor | None = None) -> None:
        """Move the averages towards the present parameters.

        skipped : a scalar on the device; if it is 1, the averages don't change. ``count_update`` must come before.
        """
        if self._swapped:
            raise RuntimeError("EMA.update() inside EMA.swapped(): training must use its own weights")
        params = self._params()
        if not self._averages:
            self._averages = {name: param.to(_wide(param.dtype), copy=True) for name, param in params.items()}
        elif len(self._averages) > len(params):  # some were frozen since
            self._averages = {name: self._averages[name] for name in params}
        averages = [self._averages[name] for name in params]
        targets = [param.to(mean.dtype) for param, mean in zip(params.values(), averages, strict=True)]
        if skipped is None:
            self.count_update()
            torch._foreach_lerp_(averages, targets, self._weight.numbers[0])
        else:  # lerp takes no list with a weight on a device
            weight, = self._weight.on(skipped.device)
            deltas = torch._foreach_sub(targets, averages)
            torch._foreach_mul_(deltas, weight * (1.0 - skipped))
            torch._foreach_add_(averages, deltas)

    def tensors(self) -> list[torch.Tensor]:
        """Return the averages, which ``update`` moves in place."""
        return list(self._averages.values())

    def track_trainable(self) -> None:
        """Also average parameters that were unfrozen since the last update."""
        if self._averages:
            for name, param in self._params().items():
                self._averages.setdefault(name, param.to(_wide(param.dtype), copy=True))

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the module the averaged parameters inside this context."""
        if not self._averages:
            yield
            return
        own = {name: param.detach().clone() for name, param in self._params().items()}
        self._copy_in(self._averages)
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            self._copy_in(own)

    def state_dict(self) -> dict[str, Any]:
        """Return a state with the averages under ``weights``, as a complete state dict of the module."""
        weights = dict(self.module.state_dict())
        averages = {id(param): self._averages.get(name) for name, param in self.module.named_parameters()}
        for name, param in self.module.named_parameters(remove_duplicate=False):  # tied parameters have several names
            if name in weights and averages[id(param)] is not None:
                weights[name] = averages[id(param)]
        return {"weights": weights, "updates": self.updates, "decay": self.decay}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        unlike = differences(self.module.state_dict(), state["weights"])
        if unlike:
            raise SbkitError(f"the moving average in the checkpoint belongs to another model: {unlike}")
        self.updates = int(state["updates"])
        self._averages = {
            name: state["weights"][name].to(param.device, _wide(param.dtype), copy=True)
            for name, param in self.module.named_parameters() if param.is_floating_point()
        } if self.updates else {}  # including frozen ones, which may be unfrozen by now

    def _params(self) -> dict[str, torch.Tensor]:
        return {name: param.detach() for name, param in self.module.named_parameters() if param.requires_grad}

    @torch.no_grad()
    def _copy_in(self, values: Mapping[str, torch.Tensor]) -> None:
        params = self._params()
        torch._foreach_copy_(list(params.values()), [values[name] for name in params])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of averages: fp32 for half-precision parameters, which have too few digits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


stock.DEFAULT_SAVE_HOOKS[EMA] = stock.torch_save
stock.DEFAULT_LOAD_HOOKS[EMA] = stock.torch_recovery
