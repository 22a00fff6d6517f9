"""Collects the outputs of inner layers of an encoder, for losses on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from sbkit.errors import SbkitError


def stack(encoder: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """Find the part of a transformer that has the list ``layers``, and that list; raises if there is none."""
    for part in (encoder, getattr(encoder, "encoder", None)):
        layers = getattr(part, "layers", None)
        if isinstance(part, nn.Module) and isinstance(layers, nn.ModuleList):
            return part, layers
    raise SbkitError(f"{type(encoder).__name__} has no list of layers to look between",
                     hint="intermediate_ctc needs encoder.layers or layers")


@contextmanager
def tapped(encoder: nn.Module, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Context in which a forward of ``encoder`` fills the list with the outputs of ``layers``, each [B, T, D].

    They are normalised as the encoder normalises the output of its last layer.

    layers : their numbers, counted from 1
    """
    states: list[Tensor] = []
    if not layers:
        yield states
        return
    inside, stacked = stack(encoder)
    count = len(stacked)
    if not all(1 <= layer < count for layer in layers):
        raise SbkitError(f"intermediate_layers {list(layers)}: the encoder has {count} layers",
                         hint=f"use numbers from 1 to {count - 1}")
    norm = getattr(inside, "norm", None) or nn.Identity()

    def keep(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> None:
        states.append(norm(output[0] if isinstance(output, tuple) else output))

    hooks = [stacked[layer - 1].register_forward_hook(keep) for layer in layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
