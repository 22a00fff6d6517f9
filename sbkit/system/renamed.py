"""Former names of arguments, methods and module attributes, accepted for one release with a warning."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

#: The default of an argument under its former name.
FORMER: Any = type("Former", (), {"__repr__": lambda self: "(a former name)"})()  # stands for any type


def renamed(module: str, **names: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` for former names.

    names : the present name of each former one
    """
    def find(name: str) -> Any:  # whatever has that name
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now called {names[name]}", FutureWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return find


def argument(owner: str, **values: Any) -> Any:  # of the argument's type
    """Return the value of an argument that may have been given by its former name.

    values : the value under the former name, and under the present one
    """
    (former, given), (present, value) = values.items()
    if given is FORMER:
        return value
    warn_once(f"{owner}: {former} is now called {present}")
    return given


def rename_methods(owner: type, **names: str) -> None:
    """Rename methods that a class defines by their former names."""
    for former, present in names.items():
        if former in vars(owner):
            warn_once(f"{owner.__name__}: the method {former} is now called {present}")
            setattr(owner, present, vars(owner)[former])


@functools.cache
def warn_once(line: str) -> None:
    """Log a warning once in this process."""
    logger.warning("%s", line)
