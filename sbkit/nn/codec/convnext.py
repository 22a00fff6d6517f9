"""ConvNeXt blocks over frames, in which padding has no effect on what is real."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A depthwise convolution over time, then a layer of each frame by itself, added to the input.

    Arguments
    ---------
    size : channels
    hidden : channels within the block
    kernel_size : frames that the convolution sees, an odd number
    scale : of what is added in the beginning: small, so that many blocks begin as none
    """

    def __init__(self, size: int, hidden: int, kernel_size: int = 7, scale: float = 1.0):
        super().__init__()
        self.depthwise = nn.Conv1d(size, size, kernel_size, padding=kernel_size // 2, groups=size)
        self.norm = nn.LayerNorm(size)
        self.wide, self.narrow = nn.Linear(size, hidden), nn.Linear(hidden, size)
        self.scale = nn.Parameter(torch.full((size,), scale))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """[B, T, C] and [B, T, 1], 1 for frames that exist and 0 for padding, to [B, T, C]."""
        y = self.depthwise((x * real).transpose(1, 2)).transpose(1, 2)
        y = self.narrow(functional.gelu(self.wide(self.norm(y))))
        return x + self.scale * y


class ConvNeXt(nn.Module):
    """A stack of ``Block``: [B, T, C] and [B, T, 1] (1: real, 0: padding) to [B, T, C]."""

    def __init__(self, size: int, hidden: int, layers: int, kernel_size: int = 7):
        super().__init__()
        self.blocks = nn.ModuleList([Block(size, hidden, kernel_size, 1 / max(1, layers)) for _ in range(layers)])

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, real)
        return x
