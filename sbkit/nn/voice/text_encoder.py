"""The encoder of a voice: symbols of a text to states, with the speaker and the place in the sentence in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.codec.convnext import ConvNeXt
from sbkit.nn.lengths import lengths_to_mask

#: In symbols: how fast the first and the last symbol fade from what a state is told about them.
FADES = (1.0, 4.0, 16.0)


class TextEncoder(nn.Module):
    """Ids of symbols [B, U], their numbers [B] and speakers [B] to states [B, U + 2, C], 0 for padding: those of the
    silence before, of the symbols, and of the silence after, which has the row behind the symbols' in the table.

    A sentence's melody depends on where it begins and ends, which may be further away than convolutions see: each
    state is told how near both are.

    Arguments
    ---------
    symbols : rows of the table, with padding's, which is row 0
    size, hidden : of the ConvNeXt blocks
    layers : blocks
    speakers : voices to choose from
    """

    def __init__(self, symbols: int, size: int = 192, hidden: int = 576, layers: int = 6, kernel_size: int = 7,
                 speakers: int = 1):
        super().__init__()
        if symbols < 2 or speakers < 1:
            raise ValueError(f"symbols is {symbols} and speakers {speakers}: there must be a symbol beside padding, "
                             "and a speaker")
        self.symbols, self.size, self.speakers = symbols, size, speakers
        self.table, self.speaker = nn.Embedding(symbols + 1, size), nn.Embedding(speakers, size)
        self.place = nn.Linear(2 * len(FADES), size)
        self.blocks = ConvNeXt(size, hidden, layers, kernel_size)
        self.norm = nn.LayerNorm(size)

    def forward(self, text: Tensor, lengths: Tensor, speaker: Tensor) -> Tensor:
        width = text.shape[1] + 2
        at = torch.arange(width, device=text.device)
        silent = (at == 0) | (at == lengths[:, None] + 1)
        text = torch.where(silent, self.symbols, functional.pad(text, (1, 1)))
        real = lengths_to_mask(lengths + 2, width)[..., None].to(self.table.weight.dtype)
        x = self.table(text) + self.speaker(speaker)[:, None] + self.place(nearness(lengths + 2, width))
        return self.norm(self.blocks(x, real)) * real


def nearness(lengths: Tensor, width: int) -> Tensor:
    """Tell how near each place is to the beginning and to the end, on several scales: [B, width, 2 * len(FADES)]."""
    at = torch.arange(width, device=lengths.device)
    before, after = at.expand(lengths.shape[0], -1), (lengths[:, None] - 1 - at).clamp(min=0)
    return torch.stack([(-side / fade).exp() for side in (before, after) for fade in FADES], dim=2)
