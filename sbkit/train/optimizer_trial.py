"""Tries an optimizer of the user's own on a small parameter, since a run says nothing of what it does wrong.

An optimizer that says it skips steps by itself (see ``sbkit.train.update``) must divide gradients by ``grad_scale`` and
change nothing if ``found_inf`` is 1; and any must go on after a stop as if there had been none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sbkit.train.optim import fused
from sbkit.train.update import skips_itself, update, write_rates

#: Rows and columns of the parameter.
_SHAPE = (8, 8)
#: A rate of which each step is seen, also if a schedule sets the recipe's, which may be 0.
_RATE = 0.1
#: What the first gradients are divided by. A power of two loses no digits. It is large since optimizers such as Lion
#: and Adam only know how large a gradient is beside those before it.
_DIVISOR = 256.0
#: The largest difference between equal weights, as a share of how far they moved.
_TOLERANCE = 1e-3
#: Steps before and after a stop. Some optimizers do something only once in several steps.
_STEPS_BEFORE, _STEPS_AFTER = 3, 10

_CONTRACT = 'see "An optimizer that skips steps by itself" in docs/how-to/extend.md'


def mistakes_of(opt_class: Callable[..., Optimizer]) -> Iterator[tuple[str, str]]:
    """Try an optimizer, if its class is neither torch's nor sbkit's; yields what it does wrong, and the remedy."""
    try:
        trial = _Trial(fused(opt_class), _initial_weights())
        of_a_library = type(trial.optimizer).__module__.partition(".")[0] in ("torch", "sbkit")
        if of_a_library:
            return
        trial.parameter.grad = trial.gradient(0)
        trial.optimizer.step()
    except Exception:  # it needs what only a run has, such as modules, a closure or other ranks
        return

    if skips_itself(trial.optimizer):
        try:
            yield from _mistakes_in_scaling(fused(opt_class))
        except Exception as error:  # whatever its class raises
            yield (f"its step fails with tensors as lr, grad_scale and found_inf: {error}",
                   f"take a tensor as lr, or leave out _step_supports_amp_scaling; {_CONTRACT}")
            return
    try:
        continues = _continues_after_stop(fused(opt_class))
    except Exception as error:
        yield (f"it can't take its state from a checkpoint: {error}",
               "let load_state_dict take what state_dict returns")
        return
    if not continues:
        yield ("its steps after a stop are others than without one: state_dict() lacks some of what it keeps",
               "keep all that changes from step to step in self.state[parameter] or in param_groups")


class _Trial:
    """An optimizer and the parameter that it updates."""

    def __init__(self, make: Callable[..., Optimizer], weights: Tensor):
        self.parameter = nn.Parameter(weights.clone())
        self.optimizer = make([self.parameter])
        for group in self.optimizer.param_groups:
            if isinstance(group.get("lr"), float):
                group["lr"] = _RATE

    def gradient(self, step: int) -> Tensor:
        """Return the gradient of a step. Beside that of the step before, each element has another sign, and its own
        size, from far smaller to far larger: so what is wrong in a momentum changes the sign of some updates."""
        sizes = torch.logspace(-4, 2, self.parameter.numel()).view(_SHAPE)
        return torch.ones(_SHAPE) if step % 2 == 0 else -sizes

    def step(self, gradient: Tensor, divisor: float = 1.0, finite: bool = True) -> None:
        """Make a step as a run does."""
        self.parameter.grad = gradient
        rates = write_rates([self.optimizer], torch.device("cpu"))
        with torch.random.fork_rng(devices=[]):  # some round at random
            torch.manual_seed(0)
            update([self.optimizer], torch.tensor(1 / divisor), None, torch.tensor(finite), rates)

    def snapshot(self) -> tuple[Tensor, dict[str, object]]:
        """Return copies of the weights, and of what a checkpoint holds of the optimizer."""
        return self.parameter.detach().clone(), copy.deepcopy(self.optimizer.state_dict())


def _mistakes_in_scaling(make: Callable[..., Optimizer]) -> Iterator[tuple[str, str]]:
    """Yield what an optimizer that skips steps by itself does wrong in one, and with the divisor of gradients."""
    divided = _Trial(make, _initial_weights())
    expected = _Trial(make, _initial_weights())
    for step, divisor in enumerate((_DIVISOR, 1.0)):
        gradient = divided.gradient(step)
        divided.step(gradient.clone(), divisor)
        expected.step(gradient / divisor)
    if not _moved_alike([divided, expected], _initial_weights()):
        yield ("it doesn't divide gradients by self.grad_scale, so steps are as large as its gradients are before "
               "they are averaged and clipped", f"divide each gradient by it, if it is not None; {_CONTRACT}")

    for what, value in (("", 1.0), (", of gradients that are NaN", float("nan"))):
        trial = _Trial(make, _initial_weights())
        trial.step(trial.gradient(0))
        weights, state = trial.snapshot()
        trial.step(torch.full(_SHAPE, value), finite=False)
        weights_after, state_after = trial.snapshot()
        changed = []
        if not _equal(weights, weights_after):
            changed.append("weights")
        if not _equal(state, state_after):
            changed.append("state")
        if changed:
            yield (f"its step changes {' and '.join(changed)} although self.found_inf is 1{what}",
                   f"choose by torch.where(found_inf > 0, old, new), as 0 times NaN is NaN; {_CONTRACT}")
            return


def _continues_after_stop(make: Callable[..., Optimizer]) -> bool:
    """Return whether an optimizer that has loaded the state of another one goes on as that one does."""
    without_stop = _Trial(make, _initial_weights())
    for step in range(_STEPS_BEFORE):
        without_stop.step(without_stop.gradient(step))
    weights, state = without_stop.snapshot()
    after_stop = _Trial(make, weights)
    after_stop.optimizer.load_state_dict(state)
    for step in range(_STEPS_BEFORE, _STEPS_BEFORE + _STEPS_AFTER):
        for trial in (without_stop, after_stop):
            trial.step(trial.gradient(step))
        if not _moved_alike([without_stop, after_stop], weights):
            return False
    return True


def _initial_weights() -> Tensor:
    return torch.linspace(-1, 1, _SHAPE[0] * _SHAPE[1]).view(_SHAPE)


def _moved_alike(trials: Sequence[_Trial], start: Tensor) -> bool:
    """Return whether two optimizers have moved their weights from the same start to the same values."""
    first, second = (trial.parameter.detach() for trial in trials)
    farthest = float((second - start).abs().max())
    return torch.allclose(first, second, rtol=0.0, atol=_TOLERANCE * farthest + 1e-7)


def _equal(first: object, second: object) -> bool:
    """Return whether two weights or states are the same to the bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_equal(first[name], second[name]) for name in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)
