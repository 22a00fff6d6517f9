"""What a class of optimizers of the user's own does wrong is told before a run, which would not show it."""

import functools
from pathlib import Path

import pytest
import torch

from sbkit.recipe.check import check
from sbkit.train.muon import Muon
from sbkit.train.optimizer_trial import mistakes_of

SMALL = Path(__file__).parents[1] / "recipe" / "small.yaml"


class Lion(torch.optim.Optimizer):
    """Moves each weight by the sign of a momentum; skips steps by itself."""

    _step_supports_amp_scaling = True

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), fused=True):
        super().__init__(params, {"lr": lr, "betas": betas, "fused": fused})

    def gradient(self, grad):
        grad_scale = getattr(self, "grad_scale", None)
        return grad if grad_scale is None else grad / grad_scale

    def keep(self, old, new):
        found_inf = getattr(self, "found_inf", None)
        return new if found_inf is None else torch.where(found_inf > 0, old, new)

    def momentum_of(self, parameter):
        return self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = self.gradient(parameter.grad)
                momentum = self.momentum_of(parameter)
                beta1, beta2 = group["betas"]
                moved = parameter - group["lr"] * torch.lerp(grad, momentum, beta1).sign()
                parameter.copy_(self.keep(parameter, moved.to(parameter.dtype)))
                momentum.copy_(self.keep(momentum, torch.lerp(grad, momentum, beta2)))


class Plain(Lion):
    _step_supports_amp_scaling = False


class Unscaled(Lion):
    def gradient(self, grad):
        return grad


class Multiplied(Lion):
    def gradient(self, grad):
        grad_scale = getattr(self, "grad_scale", None)
        return grad if grad_scale is None else grad * grad_scale


class NeverSkips(Lion):
    def keep(self, old, new):
        return new


class TimesZero(Lion):
    """Skips by a product, which is NaN if the gradient is."""

    def keep(self, old, new):
        found_inf = getattr(self, "found_inf", torch.zeros(()))
        return old + (1 - found_inf) * (new - old)


class CountsSkipped(Lion):
    """Counts the steps that it skips, too."""

    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            state["steps"] = state.get("steps", 0) + 1


class NumbersOnly(Lion):
    def step(self, closure=None):
        assert all(isinstance(group["lr"], float) for group in self.param_groups), "lr is no number"
        super().step()


class KeepsElsewhere(Lion):
    """Its momenta are in no checkpoint."""

    def momentum_of(self, parameter):
        momenta = vars(self).setdefault("momenta", {})
        return momenta.setdefault(parameter, torch.zeros_like(parameter))


class PlainKeepsElsewhere(KeepsElsewhere):
    _step_supports_amp_scaling = False


class NeedsMore(Lion):
    """Can't step without what only a run gives it."""

    def step(self, closure=None):
        assert closure is not None
        super().step()


RIGHT = [Lion, Plain, functools.partial(Lion, lr=0.0), functools.partial(Lion, fused=False), NeedsMore,
         torch.optim.AdamW, functools.partial(torch.optim.LBFGS, lr=0.1), functools.partial(Muon, modules=())]


@pytest.mark.parametrize("opt_class", RIGHT)
def test_says_nothing_of_an_optimizer_that_is_right_or_cannot_be_tried(opt_class):
    assert list(mistakes_of(opt_class)) == []


@pytest.mark.parametrize("opt_class, message, remedy", [
    (Unscaled, "it doesn't divide gradients by self.grad_scale", "divide each gradient by it"),
    (Multiplied, "it doesn't divide gradients by self.grad_scale", "divide each gradient by it"),
    (NeverSkips, "its step changes weights and state although self.found_inf is 1", "torch.where"),
    (TimesZero, "its step changes state although self.found_inf is 1, of gradients that are NaN", "torch.where"),
    (CountsSkipped, "its step changes state although self.found_inf is 1", "torch.where"),
    (NumbersOnly, "its step fails with tensors as lr, grad_scale and found_inf: lr is no number", "take a tensor"),
    (KeepsElsewhere, "its steps after a stop are others than without one", "self.state[parameter]"),
    (PlainKeepsElsewhere, "its steps after a stop are others than without one", "self.state[parameter]"),
])
def test_names_each_mistake_and_its_remedy(opt_class, message, remedy):
    [(told, advice)] = mistakes_of(opt_class)
    assert told.startswith(message) and remedy in advice


def test_draws_no_random_numbers_of_the_run():
    before = torch.get_rng_state()
    list(mistakes_of(Lion))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_the_check_of_a_recipe_reports_them(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    errors = []
    for optimizer in (Unscaled, Lion):
        recipe.write_text(f"recipe: !include:{SMALL}\n    opt_class: !name:{__name__}.{optimizer.__name__}\n")
        errors.append([(error.key, error.code) for error in check(recipe).errors])
    assert errors == [[("opt_class", "wrong-optimizer")], []]
