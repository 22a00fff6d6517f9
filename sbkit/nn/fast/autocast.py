"""A decorator for autograd functions that choose their own dtypes, and the type of their context."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Context = Any  # an autograd function's first argument, which takes any attribute


def without_autocast(method: Callable[..., T]) -> Callable[..., T]:
    """Run ``method`` without autocast on the CPU, which may differ between forward and backward."""

    @functools.wraps(method)
    def run(*arguments: Any) -> T:
        with torch.autocast("cpu", enabled=False):
            return method(*arguments)

    return run
