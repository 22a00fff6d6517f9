"""Parts of a model that don't train: never, or not in the first so many optimizer steps.

What is frozen needs no gradient, so nothing is kept for a backward through what lies below it, and its optimizer holds
no state of it. A module of which every parameter is frozen runs as it would in use: nothing dropped, statistics left
as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sbkit.errors import SbkitError
from sbkit.recipe.parts import Parts, opened, until

#: Parameters that a ``Freezing`` has set: any other one without a gradient was frozen by the model itself.
_FROZEN = WeakTensorKeyDictionary()


class Freezing:
    """Sets which parameters train, by the number of optimizer steps that are done.

    Arguments
    ---------
    modules : all that a Brain trains
    parts : their parameters by the names that a recipe has for them
    wanted : ``{PATTERN: true | STEPS}``; of several that fit, the last counts. What the model itself has frozen (the
        base of adapters, a pretrained encoder's convolutions) never thaws.
    """

    def __init__(self, modules: torch.nn.Module, parts: Parts, wanted: Mapping[str, bool | int] | None):
        self.modules = modules
        told = parts.told(wanted or {}, "freeze")
        own = {path for path, parameter in parts.parameters.items()
               if not parameter.requires_grad and parameter not in _FROZEN}
        _refuse_pointless(wanted or {}, parts, own)
        self._until = {path: until(value) for path, value in told.items() if until(value) > 0 and path not in own}
        self._turns = sorted({step for step in self._until.values() if step < float("inf")})
        self._stage = -1
        self.at(int(self._turns[-1]) if self._turns else 0)

    @property
    def thaws(self) -> bool:
        """Whether something that is frozen at first trains later."""
        return bool(self._turns)

    def at(self, step: int) -> bool:
        """Freeze and thaw for what follows so many optimizer steps; whether that changed anything."""
        stage = sum(turn <= step for turn in self._turns)
        if stage == self._stage:
            return False
        self._stage = stage
        for path, parameter in self.modules.named_parameters(remove_duplicate=False):
            if path in self._until:
                parameter.requires_grad_(step >= self._until[path])
                _FROZEN[parameter] = True
        self.rest()
        return True

    def told(self) -> str:
        """How much is frozen, and until when, in words; empty where nothing is."""
        counts: dict[float, int] = {}
        for path, parameter in self.modules.named_parameters():
            if path in self._until:
                counts[self._until[path]] = counts.get(self._until[path], 0) + parameter.numel()
        total = sum(parameter.numel() for parameter in self.modules.parameters())
        said = (f"{count:,}" + (f" until step {step:.0f}" if step < float("inf") else "")
                for step, count in sorted(counts.items()))
        return f"Frozen: {', '.join(said)} of {total:,} parameters" if counts else ""

    def turns(self, step: int) -> bool:
        """Whether something thaws right after so many optimizer steps."""
        return step in self._turns

    def train(self) -> None:
        """Put all modules into training mode, but for those that rest."""
        self.modules.train()
        self.rest()

    def rest(self) -> None:
        """Put those modules into evaluation mode of which every parameter is frozen, some by the recipe."""
        ours = {id(parameter) for path, parameter in self.modules.named_parameters(remove_duplicate=False)
                if path in self._until}
        for module in self.modules.modules() if ours else ():
            parameters = list(module.parameters())
            if any(id(parameter) in ours for parameter in parameters) and not any(
                    parameter.requires_grad for parameter in parameters):
                module.eval()

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Within it all parameters may train: an optimizer is to know those as well that thaw later."""
        frozen = [parameter for path, parameter in self.modules.named_parameters(remove_duplicate=False)
                  if path in self._until and not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


def _refuse_pointless(wanted: Mapping[str, bool | int], parts: Parts, own: set[str]) -> None:
    """Raise where a pattern lets something train from a step on that the model itself keeps frozen."""
    for pattern, value in opened(wanted).items():
        if 0 < until(value) < float("inf") and parts.matching(pattern) <= own:
            raise SbkitError(f"freeze: {pattern} is to train after step {value}, but the model itself keeps it frozen",
                             hint="take it out of freeze; for a pretrained encoder's convolutions see freeze_front")
