"""Durations of symbols: predicted, rounded to frames, and symbols' states spread over them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sbkit.nn.codec.convnext import ConvNeXt
from sbkit.nn.lengths import lengths_to_mask

#: The logarithm of the most frames of a symbol: a symbol of seconds is a mistake, and must not fill the memory.
MOST = 5.5


class Durations(nn.Module):
    """States of symbols [B, U, C] and their numbers [B] to the logarithms of one more than their frames [B, U].

    Arguments
    ---------
    input_size : C
    size, hidden : of the ConvNeXt blocks
    layers : blocks
    """

    def __init__(self, input_size: int, size: int = 128, hidden: int = 256, layers: int = 2, kernel_size: int = 5):
        super().__init__()
        self.input_size = input_size
        self.first, self.norm = nn.Linear(input_size, size), nn.LayerNorm(size)
        self.blocks = ConvNeXt(size, hidden, layers, kernel_size)
        self.last = nn.Linear(size, 1)

    def forward(self, states: Tensor, lengths: Tensor) -> Tensor:
        real = lengths_to_mask(lengths, states.shape[1])[..., None].to(states.dtype)
        return self.last(self.norm(self.blocks(self.first(states), real)))[..., 0].float()


def loss(predicted: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """Return the squared distance of the logarithms, a sum over the symbols of each utterance [B]."""
    apart = predicted - (frames + 1).float().log()
    return (apart.square() * lengths_to_mask(lengths, frames.shape[1])).sum(1)


def rounded(predicted: Tensor, lengths: Tensor, speed: Tensor) -> Tensor:
    """Round predicted durations at speeds [B] to frames [B, U], so that none of the time is lost or added: what is
    rounded is when each symbol ends. An utterance has a frame at least."""
    wanted = (predicted.clamp(0.0, MOST).exp() - 1) / speed[:, None] * lengths_to_mask(lengths, predicted.shape[1])
    ends = wanted.cumsum(1).round().long()
    ends = torch.where(torch.arange(ends.shape[1], device=ends.device) >= lengths[:, None] - 1, ends.clamp(min=1), ends)
    return ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))


def spread(states: Tensor, frames: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Give each of ``width`` frames its symbol's state, [B, width, C], and its place in the symbol [B, width, 3]: the
    shares before and after it, and the logarithm of the symbol's frames. Frames behind the last have any."""
    ends = frames.cumsum(1)
    at = torch.arange(width, device=frames.device).expand(frames.shape[0], -1)
    symbol = (ends[:, None] <= at[..., None]).sum(2).clamp(max=frames.shape[1] - 1)
    size = frames.gather(1, symbol).clamp(min=1).float()
    before = (at - (ends - frames).gather(1, symbol)).float() + 0.5
    place = torch.stack([before / size, 1 - before / size, size.log()], dim=2)
    return states.gather(1, symbol[..., None].expand(-1, -1, states.shape[2])), place
