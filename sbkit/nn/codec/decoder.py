"""The codec's decoder: quantised vectors to states at the rate of the frames of sound."""

from __future__ import annotations

from torch import Tensor, nn

from sbkit.nn.codec.convnext import ConvNeXt
from sbkit.nn.lengths import lengths_to_mask


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
