"""Checks that the parts of a model fit together, before a batch is sent through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings


class Fit(NamedTuple):
    """A size of a part, and what it has to be."""

    key: str
    argument: str
    found: int
    expected: int
    why: str


def all_fit(numbers: Sequence[Fit], built: Built, findings: Findings) -> bool:
    """Report the sizes that don't match those of other parts; returns whether all match."""
    wrong = [fit for fit in numbers if fit.found != fit.expected]
    for fit in wrong:
        node = built.nodes[fit.key]
        findings.error("shape-mismatch", node.place_of(fit.argument), node.key_of(fit.argument),
                       f"it is {fit.found}, but {fit.why.format(fit.expected)}",
                       "refer to one key of the recipe in both places")
    return not wrong
