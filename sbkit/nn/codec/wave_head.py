"""The codec's last layer: states to waveforms, by the magnitudes and phases of overlapping frames of sound."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.codec import fourier
from sbkit.nn.kaldi import full_precision
from sbkit.nn.lengths import lengths_to_mask

#: Bounds of a magnitude's logarithm: what no speech reaches, and silence.
LOUDEST, SILENT = 5.0, -12.0


class WaveHead(nn.Module):
    """States [B, N, C] and frame counts [B] to waveforms [B, N * hop], 0 beyond an utterance's frames.

    A linear layer gives each frame's log-magnitudes and phases; their inverse Fourier transforms, windowed, are added
    where they overlap. All of it is matrix products and sums of shifted frames, which any runtime has.

    Arguments
    ---------
    input_size : C
    hop : samples between two frames
    size : samples of a frame, a multiple of ``hop``
    """

    basis: Tensor

    def __init__(self, input_size: int, hop: int = 160, size: int = 640):
        super().__init__()
        fourier.check(size, hop)
        self.input_size, self.hop, self.size, self.bins = input_size, hop, size, size // 2 + 1
        self.linear = nn.Linear(input_size, 2 * self.bins)
        self.register_buffer("basis", fourier.synthesis(size, hop), persistent=False)

    def forward(self, states: Tensor, frames: Tensor) -> Tensor:
        level, phase = self.linear(states).float().split(self.bins, dim=2)
        with full_precision(states):
            magnitude = level.clamp(SILENT, LOUDEST).exp() * lengths_to_mask(frames, states.shape[1])[..., None]
            spectrum = torch.cat([magnitude * phase.cos(), magnitude * phase.sin()], dim=2)
            sound = self.overlapped(spectrum @ self.basis)
        return sound * lengths_to_mask(frames * self.hop, sound.shape[1])

    def overlapped(self, frames: Tensor) -> Tensor:
        """Add frames [B, N, size] that begin every ``hop`` samples, the first before the beginning: [B, N * hop]."""
        pieces = frames.unflatten(2, (-1, self.hop))  # [B, N, overlap, hop]
        overlap = pieces.shape[2]
        shifted = [functional.pad(pieces[:, :, i], (0, 0, i, overlap - 1 - i)) for i in range(overlap)]
        sound = torch.stack(shifted).sum(0).flatten(1)  # [B, (N + overlap - 1) * hop]
        around = (self.size - self.hop) // 2
        return sound[:, around:sound.shape[1] - around]
