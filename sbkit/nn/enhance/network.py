"""A network from features of frames to masks that sees nothing of later frames, whole or piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.enhance.transform import Frames


class CausalBlock(nn.Module):
    """A depthwise convolution over a frame and those before it, then a layer of each frame by itself, added to the
    input.

    Arguments
    ---------
    size : channels
    hidden : channels within the block
    kernel_size : frames that the convolution sees
    dilation : frames from one that it sees to the next
    scale : of what is added in the beginning
    """

    def __init__(self, size: int, hidden: int, kernel_size: int, dilation: int, scale: float):
        super().__init__()
        self.depthwise = nn.Conv1d(size, size, kernel_size, dilation=dilation, groups=size)
        self.norm = nn.LayerNorm(size)
        self.wide, self.narrow = nn.Linear(size, hidden), nn.Linear(hidden, size)
        self.scale = nn.Parameter(torch.full((size,), scale))
        self.before = (kernel_size - 1) * dilation
        """Frames before the first that it sees."""

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, C] and the frames before [B, N, C] to [B, T, C] and the frames before the next."""
        seen = torch.cat([before, x], dim=1)
        y = self.depthwise(seen.transpose(1, 2)).transpose(1, 2)
        y = self.narrow(functional.gelu(self.wide(self.norm(y))))
        return x + self.scale * y, seen[:, seen.shape[1] - self.before:]


class CausalConvolutions(nn.Module):
    """Features [B, T, F] to masks [B, T, M], by blocks whose dilations are 1, 2, 4, ..., again and again.

    Arguments
    ---------
    transform : has the sizes of features and masks, F and M; it is no part of the network
    size, hidden, layers, kernel_size : of the blocks
    cycle : layers after which the dilation is 1 again
    """

    def __init__(self, transform: Frames, size: int = 128, hidden: int = 256, layers: int = 6, kernel_size: int = 3,
                 cycle: int = 6):
        super().__init__()
        self._shapes = [((kernel_size - 1) * 2 ** (i % cycle), size) for i in range(layers)]
        self.first, self.first_norm = nn.Linear(transform.features_size, size), nn.LayerNorm(size)
        self.blocks = nn.ModuleList([CausalBlock(size, hidden, kernel_size, 2 ** (i % cycle), 1 / layers)
                                     for i in range(layers)])
        self.last_norm, self.last = nn.LayerNorm(size), nn.Linear(size, transform.masks_size)

    def state(self, batch: int) -> tuple[Tensor, ...]:
        """Make the state before the first frame, zeros: the frames [B, N, C] before those of each block."""
        weight = self.first.weight
        return tuple(weight.new_zeros(batch, *shape) for shape in self._shapes)

    def forward(self, features: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute masks of frames that follow those before, and the next state."""
        x, after = self.first_norm(self.first(features)), []
        for block, before in zip(self.blocks, state, strict=True):
            x, left = block(x, before)
            after.append(left)
        return self.last(self.last_norm(x)), tuple(after)
