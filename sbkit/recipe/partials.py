"""What a recipe's ``!name:`` with options stands for."""

from __future__ import annotations

import functools
from typing import Any


def unwrapped(made: object) -> tuple[Any, dict[str, Any]]:
    """Return the function or class inside of partials, and its options; the outer ones count.

    >>> unwrapped(functools.partial(functools.partial(int, base=8), base=2))
    (<class 'int'>, {'base': 2})
    """
    options: dict[str, Any] = {}
    while isinstance(made, functools.partial):
        options = {**made.keywords, **options}
        made = made.func
    return made, options
