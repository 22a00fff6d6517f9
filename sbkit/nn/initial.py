"""Initial weights of layers."""

from __future__ import annotations

from torch import nn


def by_layer(*modules: nn.Module | None) -> None:
    """Reinitialise linear and convolutional layers with torch's defaults, which only depend on a layer's fan-in.

    SpeechBrain's transformers use Xavier's initialisation for all weights. It also depends on the fan-out, which is
    wrong for depthwise convolutions: their weights start five times too small, and a recogniser learns later.
    A part that is null in the recipe has none.
    """
    for module in filter(None, modules):
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
                layer.reset_parameters()
