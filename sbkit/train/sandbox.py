"""Computing losses and gradients of stand-ins without changing the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from sbkit.train import rng


@contextlib.contextmanager
def restoring(holders: Iterable[nn.Module], device: torch.device | str) -> Iterator[None]:
    """Restore the attributes of modules and the random generators on exit; clearing gradients is up to the caller."""
    generators = rng.capture(device)
    before = {module: {name: dict(value) if name in ("_parameters", "_buffers") else value
                       for name, value in vars(module).items()} for root in holders for module in root.modules()}
    try:
        yield
    finally:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)
        rng.restore(generators, device)
