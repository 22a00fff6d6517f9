"""Feed-forward layers of pretrained encoders, with less to keep for backward."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Theirs(Protocol):
    """The parts that transformers' feed-forward modules have, whatever their family."""

    intermediate_dense: nn.Module
    intermediate_act_fn: nn.Module
    intermediate_dropout: nn.Module
    output_dense: nn.Module
    output_dropout: nn.Module


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, whose result is computed again in backward.

    It is four times as wide as the model, so it would be a quarter of what a layer keeps. Names and results are those
    of the module that it takes the place of.
    """

    def __init__(self, theirs: Theirs):
        super().__init__()
        self.intermediate_dense, self.intermediate_act_fn = theirs.intermediate_dense, theirs.intermediate_act_fn
        self.intermediate_dropout = theirs.intermediate_dropout
        self.output_dense, self.output_dropout = theirs.output_dense, theirs.output_dropout

    def forward(self, states: Tensor) -> Tensor:
        """States [B, T, D] to [B, T, D]."""
        wide = self.intermediate_dense(states)
        if not (self.training and torch.is_grad_enabled() and self._would_keep()):
            return self.output_dropout(self._narrowed(wide))
        random = getattr(self.intermediate_dropout, "p", 1.0) > 0
        out = checkpoint(self._narrowed, wide, use_reentrant=False, preserve_rng_state=random)
        return self.output_dropout(cast(Tensor, out))

    def _would_keep(self) -> bool:
        """Whether the second layer would keep its input (it trains), and nothing in it is random (no adapters)."""
        return type(self.output_dense) is nn.Linear and self.output_dense.weight.requires_grad

    def _narrowed(self, wide: Tensor) -> Tensor:
        out: Tensor = self.output_dense(self.intermediate_dropout(self.intermediate_act_fn(wide)))
        return out


def lighten(network: nn.Module) -> None:
    """Put a :class:`FeedForward` in the place of each of transformers' own."""
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, FeedForward) and all(hasattr(child, part) for part in Theirs.__annotations__):
                setattr(module, name, FeedForward(cast(Theirs, child)))
