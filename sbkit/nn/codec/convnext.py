"""The codec's encoder and decoder: ConvNeXt blocks over frames, in which padding has no effect on what is real."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.lengths import lengths_to_mask


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


class CodecEncoder(nn.Module):
    """Features [B, T * fold, F] and code frames [B] to vectors [B, T, D]; padding has no effect on them.

    Arguments
    ---------
    input_size : F
    output_size : D, the quantiser's ``size``
    size, hidden, layers, kernel_size : of the ConvNeXt blocks
    fold : feature frames in a code frame
    """

    def __init__(self, input_size: int, output_size: int, size: int = 128, hidden: int = 384, layers: int = 4,
                 kernel_size: int = 7, fold: int = 2):
        super().__init__()
        self.fold, self.output_size = fold, output_size
        self.first, self.first_norm = nn.Linear(fold * input_size, size), nn.LayerNorm(size)
        self.blocks = ConvNeXt(size, hidden, layers, kernel_size)
        self.last_norm, self.last = nn.LayerNorm(size), nn.Linear(size, output_size)

    def forward(self, feats: Tensor, frames: Tensor) -> Tensor:
        folded = feats.unflatten(1, (-1, self.fold)).flatten(2)
        real = lengths_to_mask(frames, folded.shape[1])[..., None].to(folded.dtype)
        x = self.blocks(self.first_norm(self.first(folded)), real)
        return self.last(self.last_norm(x)) * real


class CodecDecoder(nn.Module):
    """Vectors [B, T, D] and code frames [B] to states [B, T * fold, C], 0 for padding.

    Arguments
    ---------
    input_size : D
    size, hidden : of the ConvNeXt blocks
    slow_layers : blocks at the rate of codes
    fast_layers : blocks at the rate of frames of sound
    fold : frames of sound in a code frame
    """

    def __init__(self, input_size: int, size: int = 128, hidden: int = 384, slow_layers: int = 4, fast_layers: int = 2,
                 kernel_size: int = 7, fold: int = 2):
        super().__init__()
        self.fold, self.size, self.input_size = fold, size, input_size
        self.first, self.first_norm = nn.Linear(input_size, size), nn.LayerNorm(size)
        self.slow = ConvNeXt(size, hidden, slow_layers, kernel_size)
        self.unfold = nn.Linear(size, fold * size)
        self.fast = ConvNeXt(size, hidden, fast_layers, kernel_size)
        self.last_norm = nn.LayerNorm(size)

    def forward(self, vectors: Tensor, frames: Tensor) -> Tensor:
        real = lengths_to_mask(frames, vectors.shape[1])[..., None].to(vectors.dtype)
        x = self.slow(self.first_norm(self.first(vectors)), real)
        x = self.unfold(x).unflatten(2, (self.fold, self.size)).flatten(1, 2)
        real = real.repeat_interleave(self.fold, dim=1)
        return self.last_norm(self.fast(x, real)) * real
