"""The decoder of a voice: states of symbols, spread over frames, to states of frames."""

from __future__ import annotations

from torch import Tensor, nn

from sbkit.nn.codec.convnext import ConvNeXt
from sbkit.nn.lengths import lengths_to_mask
from sbkit.nn.voice.durations import spread


class FrameDecoder(nn.Module):
    """States of symbols [B, U, C], frames of each [B, U] and a width to states of frames [B, width, D].

    Arguments
    ---------
    input_size : C
    size, hidden : of the ConvNeXt blocks
    layers : blocks
    """

    def __init__(self, input_size: int, size: int = 256, hidden: int = 768, layers: int = 6, kernel_size: int = 7):
        super().__init__()
        self.input_size, self.size = input_size, size
        self.first, self.place, self.first_norm = nn.Linear(input_size, size), nn.Linear(3, size), nn.LayerNorm(size)
        self.blocks = ConvNeXt(size, hidden, layers, kernel_size)
        self.norm = nn.LayerNorm(size)

    def forward(self, states: Tensor, frames: Tensor, width: int) -> Tensor:
        real = lengths_to_mask(frames.sum(1), width)[..., None].to(states.dtype)
        spoken, place = spread(self.first(states), frames, width)
        x = self.first_norm(spoken + self.place(place.to(states.dtype)))
        return self.norm(self.blocks(x, real))
