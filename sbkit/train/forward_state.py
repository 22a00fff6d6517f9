"""Putting back what a forward and a backward change, for trials, estimates and the replay of a bad batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from sbkit.train import rng


@contextlib.contextmanager
def restoring(holders: Iterable[nn.Module], device: torch.device | str) -> Iterator[None]:
    """Restore on exit all that computing a loss and its gradients changes.

    These are buffers and other attributes of modules (running means, codebooks, counts), replaced or written to in
    place, the gradients of parameters, which are None inside this context, and the random number generators.
    """
    generators = rng.capture(device)
    modules = list(dict.fromkeys(module for holder in holders for module in holder.modules()))
    attributes = [(module, {name: dict(value) if name in ("_parameters", "_buffers") else value
                            for name, value in vars(module).items()}) for module in modules]
    held = [value for _, kept in attributes for value in (*kept["_buffers"].values(), *kept.values())
            if isinstance(value, torch.Tensor) and value.device.type != "meta"]
    with torch.no_grad():
        copies = [(tensor, tensor.detach().clone()) for tensor in {id(tensor): tensor for tensor in held}.values()]
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters(recurse=False)]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for module, kept in attributes:
            vars(module).clear()
            vars(module).update(kept)
        with torch.no_grad():
            for tensor, copy in copies:
                if not torch.equal(tensor, copy):  # an unchanged one may be an expanded view, which can't be written to
                    tensor.copy_(copy)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        rng.restore(generators, device)
