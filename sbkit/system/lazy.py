"""Names of a package that are imported from a heavier module when they are first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def on_first_use(module: str, *names: str) -> Callable[[str], Any]:
    """A package's ``__getattr__``, which takes these names from another module.

    So the command line reads the keys of a task in a moment, and what trains it, with torch, is imported where it is
    needed.
    """
    def get(name: str) -> Any:  # any of them
        if name not in names:
            raise AttributeError(f"module {module.rpartition('.')[0]!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)

    return get
