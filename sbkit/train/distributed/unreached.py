"""Parameters that the loss does not reach: one warning names them as the recipe does."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from sbkit.recipe.parts import ParameterGroups
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)


def warn_unreached(modules: nn.Module, recipe: Mapping[str, Any], warned: set[str]) -> None:
    """Warn of parameters without a gradient after the first backward, with their names in the recipe.

    warned : the parameters of earlier warnings, which are not named again; updated here
    """
    unreached = {name for name, p in modules.named_parameters() if p.requires_grad and p.grad is None}
    missing = unreached - warned
    if missing and ranks.is_main():
        whole: list[str] = []  # modules that the loss does not reach at all are named as such
        for name, module in modules.named_modules():  # parents come before their children
            inside = {f"{name}.{n}" for n, p in module.named_parameters() if p.requires_grad} - warned
            is_in_another = name.startswith(tuple(f"{parent}." for parent in whole))
            if name and inside and inside <= missing and not is_in_another:
                whole.append(name)
        covered = tuple(f"{name}." for name in whole)
        names = sorted([*whole, *(name for name in missing if not name.startswith(covered))])
        parts = ParameterGroups(modules, recipe)
        logger.warning("Not trained, because the loss does not depend on them (expected for a part that the recipe "
                       "does not use, such as a decoder): %s",
                       ", ".join(map(parts.name, names)).replace("_orig_mod.", ""))
    warned |= unreached
