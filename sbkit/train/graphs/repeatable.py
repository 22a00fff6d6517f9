"""What decides whether steps can be replayed, and how the reason is worded if they can't.

A replay runs no Python. So nothing may be captured that needs Python in each step: a recipe that doesn't say that its
steps can be repeated, layers that wait for other ranks, an optimizer that asks the host, a forward that counts its
calls in an attribute. What is known beforehand is asked here; the rest shows in a trial, and raises ``NotRepeatable``.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from sbkit.errors import first_line
from sbkit.train import rng
from sbkit.train.distributed import ranks
from sbkit.train.distributed.parallel import Parallel, communicates_in_forward
from sbkit.train.hooks import Hooks
from sbkit.train.runner import Rates

_PACKAGE = Path(__file__).parent


class NotRepeatable(Exception):
    """Says why replays of a step would not compute what the step does."""


def refusal(hooks: Hooks, parallel: Parallel) -> str | None:
    """Return why a run's steps are not captured, the same on all ranks; None if they are."""
    reason = parallel.not_captured or hooks.capture_refusal()
    if reason is None and ranks.world_size() > 1 and any(map(communicates_in_forward, hooks.modules.modules())):
        reason = "layers communicate with other ranks"
    return reason


def update_needs_python(optimizers: Sequence[Optimizer], all_optimizers: Sequence[Optimizer], rates: Rates) -> bool:
    """Return whether an update needs Python.

    optimizers, rates : those that update in this step, see ``Eager.prepare_update``
    all_optimizers : with those that are frozen, whose gradients stay
    """
    frozen = len(optimizers) < len(all_optimizers)
    hooked = any(vars(optimizer).get(f"_optimizer_step_{when}_hooks")
                 for optimizer in optimizers for when in ("pre", "post"))
    # An optimizer that asks the host whether to step, or has rates of its own, has none on the device.
    waits = any(rates_of_optimizer is None for rates_of_optimizer in rates)
    return frozen or hooked or waits


def update_key(optimizers: Sequence[Optimizer], sums: int, max_grad_norm: float | None, rates: Rates) -> Hashable:
    """Return what decides which kernels an update has, and the numbers and addresses that they get from Python.

    sums : the number of sums of a step
    """
    addresses = tuple(id(rate) for rates_of_optimizer in rates for rate in rates_of_optimizer or ())
    return sums, max_grad_norm, *map(_optimizer_key, optimizers), *addresses


def _optimizer_key(optimizer: Optimizer) -> tuple[Hashable, ...]:
    """Return the numbers of an optimizer's groups, which its kernels get from Python, and what it does by turns."""
    numbers = tuple(value for group in optimizer.param_groups for name, value in group.items()
                    if name not in ("params", "lr") and isinstance(value, (int, float, tuple)))
    return id(optimizer), numbers, getattr(optimizer, "graph_key", tuple)()


class HostState:
    """What Python alone knows of a model, of its layers and of random numbers, at the time when this is made."""

    def __init__(self, hooks: Hooks):
        # By name and owner: what is compared, and the value itself, so that no other gets its identity meanwhile.
        self._values: dict[tuple[str, int], tuple[Any, Any]] = {
            (f"{name}'s random numbers on the host", 0): (state.tolist(), state)
            for name, state in rng.capture("cpu").items()}
        for kind, owner in hooks.state_owners():
            for name, value in vars(owner).items():
                for inner, held in value.items() if name == "_buffers" else [(name, value)]:
                    self._values[f"{kind}.{inner}", id(owner)] = (_comparable(held), held)

    def refuse_changes(self, before: HostState) -> None:
        """Raise ``NotRepeatable`` if a step has changed any of it since ``before``, as a replay would not."""
        changed = []
        for key in dict.fromkeys([*before._values, *self._values]):
            in_both = key in before._values and key in self._values
            if not in_both or before._values[key][0] != self._values[key][0]:
                name, _ = key
                changed.append(name)
        if changed:
            raise NotRepeatable(f"a step changes {', '.join(changed[:3])}, and a replay would not")


def _comparable(value: object) -> object:
    """Return what tells whether a step has changed a value.

    ===================================  ==========================================================================
    a plain value                        the value itself
    a random generator on the host       its identity and its state, which each draw changes
    anything else                        its identity and, of a container, its size: its tensors may change in place
    ===================================  ==========================================================================
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    size = len(value) if isinstance(value, (list, dict, set)) else 0
    return id(value), size, _generator_state(value)


def _generator_state(value: object) -> object:
    """Return the state of a generator that draws on the host, in values that can be compared; None of anything else.

    A generator of a GPU has none here: torch itself refuses to capture draws from one that a graph doesn't know.
    """
    if isinstance(value, torch.Generator):
        return value.get_state().tolist() if value.device.type == "cpu" else None
    if isinstance(value, np.random.Generator):
        return _as_comparable(value.bit_generator.state)
    if isinstance(value, np.random.BitGenerator):
        return _as_comparable(value.state)
    if isinstance(value, np.random.RandomState):
        return _as_comparable(value.get_state(legacy=False))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return value.getstate()
    return None


def _as_comparable(state: object) -> object:
    """Return a state of numpy's, dicts of numbers and arrays, with lists instead of arrays, which ``==`` compares."""
    if isinstance(state, dict):
        return {name: _as_comparable(part) for name, part in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def root_of(error: BaseException) -> BaseException:
    """Return the error that broke a capture; the end of a broken capture fails, too."""
    while error.__context__ is not None and "captur" in str(error):
        error = error.__context__
    return error


def reason_of(error: BaseException) -> str:
    """Return why a capture failed, with the last line that is neither torch's nor of this package."""
    lines = [f" ({frame.filename}:{frame.lineno})" for frame in traceback.extract_tb(error.__traceback__)
             if "torch" not in frame.filename.split("/") and Path(frame.filename).parent != _PACKAGE]
    return first_line(error) + "".join(lines[-1:])
