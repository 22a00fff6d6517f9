"""Autograd functions that choose their types themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` without a CPU's autocast: a backward may meet another one than its forward did."""

    @functools.wraps(method)
    def run(*arguments: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return method(*arguments)

    return run
