"""Training of large models: activations that are computed again in backward, so that they need no memory until then.

In a recipe:

    activation_checkpointing: [ConformerEncoderLayer]   # class names, or paths such as model.1.encoder.layers.*
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sbkit.nn.adapters import derived
from sbkit.recipe.parts import LayerNames, layers_called


def checkpoint_activations(modules: nn.Module, wanted: LayerNames) -> None:
    """Let modules keep only their inputs in training, and run their forward again in backward.

    Modules are changed in place, so all references to them stay valid.
    """
    for module in layers_called(modules, wanted, "activation_checkpointing"):
        if not isinstance(module, _Recomputed):  # a second fit
            module.__class__ = derived(_Recomputed, type(module))  # type: ignore[arg-type]  # mypy asks objects' __hash__


class _Recomputed(nn.Module):
    """Mixed into a layer's class, before it."""

    def forward(self, *args: Any, **kwargs: Any) -> object:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)
