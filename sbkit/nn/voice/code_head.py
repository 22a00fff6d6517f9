"""The last layer of a voice: states of frames to codes, each in its book by construction."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.codec.quantiser import Quantiser


class CodeHead(nn.Module):
    """States of frames [B, T, C] to a choice for each slot of a frame.

    A slot is what a quantiser chooses for itself: an entry of a book, or a level of a number. There are as many logits
    as the widest slot has choices; those beyond a slot's own are masked, so that no id can come that doesn't exist.

    Arguments
    ---------
    input_size : C
    quantiser : of the codec
    """

    exists: Tensor

    def __init__(self, input_size: int, quantiser: Quantiser):
        super().__init__()
        self.input_size, self.choices = input_size, quantiser.choices
        self.linear = nn.Linear(input_size, len(self.choices) * max(self.choices))
        exists = torch.arange(max(self.choices)) < torch.tensor(self.choices)[:, None]
        self.register_buffer("exists", exists, persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        """Return logits [B, T, slots, choices], -inf for choices that a slot doesn't have."""
        logits = self.linear(states).float().unflatten(2, self.exists.shape)
        return logits.masked_fill(~self.exists, -torch.inf)

    def loss(self, states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross entropy of each frame [B, T], a sum over slots, and the share of right choices [B, T].

        chosen : [B, T, slots]
        """
        logits = self(states)
        apart = functional.cross_entropy(logits.flatten(0, 2), chosen.flatten(), reduction="none").view(chosen.shape)
        return apart.sum(2), (logits.argmax(3) == chosen).float().mean(2)

    def choose(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest choices [B, T, slots], and whether each frame's logits are numbers [B, T]: a choice
        among others exists too, but means nothing."""
        logits = self(states)
        return logits.argmax(3), logits.masked_fill(~self.exists, 0.0).sum((2, 3)).isfinite()
