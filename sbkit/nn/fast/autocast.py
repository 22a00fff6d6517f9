"""A decorator for autograd functions that choose their types themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``method`` without autocast on the CPU, which may differ between forward and backward."""

    @functools.wraps(method)
    def run(*arguments: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return method(*arguments)

    return run
