"""Names that had other names in an earlier release: understood for one release, with a line that says the new one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any


def renamed(module: str, **names: str) -> Callable[[str], Any]:
    """Make a module's ``__getattr__``.

    names : the present name of each former one
    """
    def find(name: str) -> Any:  # whatever has that name
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now called {names[name]}", FutureWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return find
