"""The codec's encoder: log-mel features to one vector for each code frame, for a quantiser."""

from __future__ import annotations

from torch import Tensor, nn

from sbkit.nn.codec.convnext import ConvNeXt
from sbkit.nn.lengths import lengths_to_mask


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
