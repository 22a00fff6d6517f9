"""Putting back what a forward and a backward change, for trials, estimates and the replay of a bad batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

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
    attributes = [_attributes_of(module) for module in modules]
    contents = _contents_of_tensors(attributes)
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters(recurse=False)]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for module, before in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)
        with torch.no_grad():
            for tensor, content in contents:
                if not torch.equal(tensor, content):  # an unchanged one may be an expanded view, which can't be written
                    tensor.copy_(content)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        rng.restore(generators, device)


def _attributes_of(module: nn.Module) -> dict[str, Any]:  # values of all types
    """Return a module's attributes by name, with copies of those dicts in which torch keeps parameters and buffers."""
    return {name: dict(value) if name in ("_parameters", "_buffers") else value for name, value in vars(module).items()}


def _contents_of_tensors(attributes: Iterable[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor among buffers and attributes once, with a copy of its content."""
    tensors: dict[int, torch.Tensor] = {}
    for of_module in attributes:
        for value in (*of_module["_buffers"].values(), *of_module.values()):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                tensors[id(value)] = value
    with torch.no_grad():
        return [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
