"""A moving average of the weights, kept while a run trains; validation, test and export then use it.

An average of checkpoints, taken after training, is ``sbkit/train/checkpoint_average.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from speechbrain.utils import checkpoints as stock

from sbkit.errors import SbkitError
from sbkit.nn.device_numbers import DeviceNumbers
from sbkit.train.checkpoint.state import differences


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
            raise SbkitError("bad-value",
                             f"the decay of an average must be in [0, 1), not {decay}",
                             hint="0.999 is usual",
                             key="decay", value=decay)
        self.module = module
        self.decay = decay
        self.updates = 0
        """The number of updates so far."""
        self._averages: dict[str, torch.Tensor] = {}
        """Of each parameter that trains, by its name; empty until the first update."""
        self._next_weight = DeviceNumbers([1.0])
        """The weight of the present parameters in the next average."""
        self._swapped = False

    def weight(self, updates: int) -> float:
        """Return the weight of the present parameters in the next average, after so many updates.

        Another moving average derives from this class and overrides this.
        """
        return 1.0 - min(self.decay, (1 + updates) / (10 + updates))

    def count_update(self) -> None:
        """Count an update, and write its weight to the device; called before an ``update`` with ``skipped``."""
        self._next_weight.write([self.weight(self.updates)])
        self.updates += 1

    @torch.no_grad()
    def update(self, skipped: torch.Tensor | None = None) -> None:
        """Move the averages towards the present parameters.

        skipped : a scalar on the device; if it is 1, the averages don't change. ``count_update`` must come before.
        """
        if self._swapped:
            raise RuntimeError("EMA.update() inside EMA.swapped(): training must use its own weights")
        parameters = self._trained_parameters()
        if not self._averages:
            self._averages = {name: _copied(parameter) for name, parameter in parameters.items()}
        elif len(self._averages) > len(parameters):  # some were frozen since
            self._averages = {name: self._averages[name] for name in parameters}

        averages = [self._averages[name] for name in parameters]
        targets = [parameter.to(average.dtype)
                   for parameter, average in zip(parameters.values(), averages, strict=True)]
        if skipped is None:
            self.count_update()
            torch._foreach_lerp_(averages, targets, self._next_weight.numbers[0])
        else:  # lerp takes no list with a weight on a device
            weight, = self._next_weight.on(skipped.device)
            deltas = torch._foreach_sub(targets, averages)
            torch._foreach_mul_(deltas, weight * (1.0 - skipped))
            torch._foreach_add_(averages, deltas)

    def tensors(self) -> list[torch.Tensor]:
        """Return the averages, which ``update`` moves in place."""
        return list(self._averages.values())

    def track_trainable(self) -> None:
        """Also average parameters that were unfrozen since the last update."""
        if not self._averages:
            return
        for name, parameter in self._trained_parameters().items():
            if name not in self._averages:
                self._averages[name] = _copied(parameter)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the module the averaged parameters inside this context."""
        if not self._averages:
            yield
            return
        trained = {name: parameter.clone() for name, parameter in self._trained_parameters().items()}
        self._set_parameters(self._averages)
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            self._set_parameters(trained)

    def state_dict(self) -> dict[str, Any]:
        """Return a state with the averages under ``weights``, as a complete state dict of the module."""
        weights = dict(self.module.state_dict())
        averages = {id(parameter): self._averages.get(name) for name, parameter in self.module.named_parameters()}
        # Tied parameters have several names, of which only the first has an average.
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            average = averages[id(parameter)]
            if name in weights and average is not None:
                weights[name] = average
        return {"weights": weights, "updates": self.updates, "decay": self.decay}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        unlike = differences(self.module.state_dict(), state["weights"])
        if unlike:
            raise SbkitError("other-model", f"the moving average in the checkpoint belongs to another model: {unlike}",
                             hint="use the recipe that this run started with, or another output_folder")
        self.updates = int(state["updates"])
        self._averages = {}
        if not self.updates:
            return
        for name, parameter in self.module.named_parameters():  # also of frozen ones, which may be unfrozen by now
            if parameter.is_floating_point():
                saved = state["weights"][name]
                self._averages[name] = saved.to(parameter.device, _wide(parameter.dtype), copy=True)

    def _trained_parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()
                if parameter.requires_grad}

    @torch.no_grad()
    def _set_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        parameters = self._trained_parameters()
        torch._foreach_copy_(list(parameters.values()), [values[name] for name in parameters])


def weights_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's state dict from the state of a model or of an ``EMA``."""
    return state["weights"] if set(state) == {"weights", "updates", "decay"} else state


def _copied(parameter: torch.Tensor) -> torch.Tensor:
    """Return the first average of a parameter."""
    return parameter.to(_wide(parameter.dtype), copy=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of averages: fp32 for half-precision parameters, which have too few digits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


stock.DEFAULT_SAVE_HOOKS[EMA] = stock.torch_save
stock.DEFAULT_LOAD_HOOKS[EMA] = stock.torch_recovery
