"""Frozen parts of a model: parameters that never train, or only after a number of optimizer steps.

Frozen parameters need no gradient and no optimizer state, and no activations are kept for a backward below them. A
module with only frozen parameters runs in evaluation mode: no dropout, and its statistics don't change.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sbkit.errors import SbkitError
from sbkit.recipe.parts import ParameterGroups, frozen_until
from sbkit.recipe.patterns import flattened

#: Parameters that some ``Freezing`` has set. Others that need no gradient were frozen by the model itself.
_FROZEN = WeakTensorKeyDictionary()


class Freezing:
    """Sets which parameters train, by the number of optimizer steps done.

    parts : their parameters by their names in the recipe
    wanted : ``{PATTERN: true | STEPS}``; the last pattern that matches counts. What the model itself has frozen (the
        base of adapters, a pretrained encoder's convolutions) always stays frozen.
    """

    def __init__(self, modules: torch.nn.Module, parts: ParameterGroups, wanted: Mapping[str, bool | int] | None):
        self.modules = modules
        values = parts.values_by_path(wanted or {}, "freeze")  # fails if a pattern fits nothing
        self._frozen_by_model = {path for path, parameter in parts.parameters.items()
                                 if not parameter.requires_grad and parameter not in _FROZEN}
        """Paths of parameters."""
        for pattern, value in flattened(wanted or {}).items():
            if 0 < frozen_until(value) < math.inf and parts.matching(pattern) <= self._frozen_by_model:
                raise SbkitError(
                    "frozen-by-model",
                    f"freeze: {pattern} is to train after step {value}, but the model itself keeps it frozen",
                    hint="take it out of freeze; for a pretrained encoder's convolutions see freeze_front",
                    key="freeze", value=pattern)

        self._frozen_by_recipe: dict[str, float] = {}
        """The number of steps in which parameters don't train, by path."""
        for path, value in values.items():
            if frozen_until(value) > 0 and path not in self._frozen_by_model:
                self._frozen_by_recipe[path] = frozen_until(value)
        self.unfreeze_steps = sorted({step for step in self._frozen_by_recipe.values() if step < math.inf})
        """The numbers of steps after which something begins to train."""
        self._thaws_done: int | None = None
        """How many of these are over; None before the first ``apply``."""
        self.next_change: float | None = None
        """The number of steps after which ``apply`` changes something next; None: nothing changes any more."""
        self.apply(int(self.unfreeze_steps[-1]) if self.unfreeze_steps else 0)

    def apply(self, steps_done: int) -> None:
        """Freeze and unfreeze parameters for what follows this many steps."""
        self.next_change = min((step for step in self.unfreeze_steps if step > steps_done), default=None)
        thaws_done = sum(step <= steps_done for step in self.unfreeze_steps)
        if thaws_done == self._thaws_done:
            return
        self._thaws_done = thaws_done
        for parameter, until in self._parameters():
            parameter.requires_grad_(steps_done >= until)
            _FROZEN[parameter] = True
        self._eval_frozen()

    def _parameters(self) -> list[tuple[torch.nn.Parameter, float]]:
        """Return the parameters that the recipe freezes, each with the number of steps."""
        return [(parameter, self._frozen_by_recipe[path]) for path, parameter
                in self.modules.named_parameters(remove_duplicate=False) if path in self._frozen_by_recipe]

    @property
    def until(self) -> dict[str, float]:
        """The optimizer steps in which parameters don't train, by path; infinite for those that never do."""
        return {**self._frozen_by_recipe, **dict.fromkeys(self._frozen_by_model, math.inf)}

    def train(self) -> None:
        """Put all modules into training mode, except those with only frozen parameters."""
        self.modules.train()
        self._eval_frozen()

    def _eval_frozen(self) -> None:
        """Put modules with only frozen parameters, some of them by the recipe, into evaluation mode."""
        of_recipe = {id(parameter) for parameter, _ in self._parameters()}
        if not of_recipe:
            return
        for module in self.modules.modules():
            parameters = list(module.parameters())
            has_ours = any(id(parameter) in of_recipe for parameter in parameters)
            if has_ours and not any(parameter.requires_grad for parameter in parameters):
                module.eval()

    @contextlib.contextmanager
    def all_trainable(self) -> Iterator[None]:
        """Let all parameters train inside this context, so that an optimizer gets those that are unfrozen later."""
        frozen = [parameter for parameter, _ in self._parameters() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
