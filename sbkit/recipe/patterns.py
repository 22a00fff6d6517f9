"""The values of keys that map patterns for parts of a model, such as ``freeze: {CNN: true, Transformer.encoder: 500}``.

What the patterns match is found in ``recipe/parts.py``; declaring such a key needs no model, and so no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sbkit.system.schema import COUNT, POSITIVE


class Patterns(NamedTuple):
    """The allowed values of a key that is a mapping of patterns for parts."""

    values: str
    """The values of the mapping, in words."""
    fits: Callable[[Any], bool]
    """Whether a value of the mapping is allowed."""
    example: str
    """A value of the mapping, for hints."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, Mapping) and all(map(self.fits, flattened(value).values()))

    def __str__(self) -> str:
        return f"a mapping of parts to {self.values}"


FREEZE = Patterns("true, false or a number of steps", lambda value: isinstance(value, bool) or value in COUNT, "true")
FACTORS = Patterns("a number above 0", POSITIVE.__contains__, "0.1")

#: Keys whose entries are reported one by one, each with its line.
BY_PART = {"freeze": FREEZE, "learning_rates": FACTORS}


def flattened(wanted: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Patterns and their values at one level: ``{a: {b: 1}}``, which ``--KEY.a.b 1`` gives, becomes ``{a.b: 1}``."""
    flat: dict[str, Any] = {}
    for name, value in wanted.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{before}{name}."))
        else:
            flat[f"{before}{name}"] = value
    return flat
