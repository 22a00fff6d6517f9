"""Transforms between waveforms and frames of coefficients, which masks are multiplied with."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from sbkit.nn.codec import fourier

#: The energy of a bin that is added to all, so that silence has a logarithm.
FLOOR = 1e-7


class Frames(nn.Module, ABC):
    """Frames of ``size`` samples every ``hop``, as coefficients and back, by two matrices.

    size : samples of a frame, a multiple of ``hop``
    hop : samples between two frames
    """

    analysis: Tensor
    """[size, C]"""
    synthesis: Tensor
    """[C, size]"""

    def __init__(self, size: int, hop: int):
        super().__init__()
        self.features_size = self.masks_size = 0
        if hop < 1 or size % hop or size == hop:
            raise ValueError(f"size is {size}: it must be a multiple of hop ({hop}), twice at least")
        self.size, self.hop = size, hop

    @property
    def overlap(self) -> int:
        """Samples that a frame shares with those before it."""
        return self.size - self.hop

    def analyse(self, signals: Tensor) -> Tensor:
        """Waveforms [B, (T - 1) * hop + size] to coefficients [B, T, C]."""
        pieces = signals.unflatten(1, (-1, self.hop))
        ratio = self.size // self.hop
        count = pieces.shape[1] - (ratio - 1)
        return torch.cat([pieces[:, i : i + count] for i in range(ratio)], dim=2) @ self.analysis

    @abstractmethod
    def features(self, coefficients: Tensor) -> Tensor:
        """Coefficients [B, T, C] to what a network is told of them, [B, T, features_size]."""

    @abstractmethod
    def masked(self, coefficients: Tensor, masks: Tensor) -> Tensor:
        """Multiply coefficients [B, T, C] with masks [B, T, masks_size]."""

    def synthesise(self, coefficients: Tensor) -> Tensor:
        """The inverse: frames are added where they overlap, [B, T, C] to [B, (T - 1) * hop + size]."""
        return fourier.overlapped(coefficients @ self.synthesis, self.hop)


class FourierFrames(Frames):
    """The short-time Fourier transform: coefficients are real parts, then imaginary parts; masks are complex.

    size : samples of a frame, 2 or more times ``hop``
    hop : samples between two frames
    power : features are log magnitudes, and the spectrum with its magnitudes raised to this
    """

    def __init__(self, size: int = 512, hop: int = 256, power: float = 0.3):
        super().__init__(size, hop)
        self.power, bins = power, size // 2 + 1
        self.features_size, self.masks_size = 3 * bins, 2 * bins
        taper = fourier.window(size).sqrt()  # whose square adds up from half a frame to the next on
        energy = taper.square().sum().sqrt().float()  # what the analysis is divided by
        self.register_buffer("analysis", fourier.analysis(size, taper), persistent=False)
        self.register_buffer("synthesis", energy * fourier.synthesis(size, hop, taper), persistent=False)

    def features(self, coefficients: Tensor) -> Tensor:
        """[B, T, C] to [B, T, F]."""
        real, imaginary = coefficients.chunk(2, dim=2)
        energy = real.square() + imaginary.square() + FLOOR
        weight = energy ** ((self.power - 1) / 2)
        return torch.cat([energy.log() / 4 + 1, real * weight, imaginary * weight], dim=2)

    def masked(self, coefficients: Tensor, masks: Tensor) -> Tensor:
        """Multiply spectra [B, T, C] with complex masks [B, T, C], given as what they differ from 1 by: a network then
        begins with speech as it is, and not with its opposite, which has the same SI-SNR."""
        (real, imaginary), (beside_1, turned) = coefficients.chunk(2, dim=2), masks.chunk(2, dim=2)
        kept = 1 + beside_1
        return torch.cat([real * kept - imaginary * turned, real * turned + imaginary * kept], dim=2)


class LearnedFrames(Frames):
    """A transform that is learnt, as Conv-TasNet's: coefficients and masks are real, and masks 0 or more.

    size : samples of a frame, a multiple of ``hop``
    hop : samples between two frames
    coefficients : of a frame
    """

    def __init__(self, size: int = 40, hop: int = 20, coefficients: int = 256):
        super().__init__(size, hop)
        self.features_size = self.masks_size = coefficients
        for name, shape in (("analysis", (size, coefficients)), ("synthesis", (coefficients, size))):
            setattr(self, name, nn.Parameter(torch.randn(shape) / shape[0] ** 0.5))

    def features(self, coefficients: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        return coefficients.relu()

    def masked(self, coefficients: Tensor, masks: Tensor) -> Tensor:
        """Multiply coefficients [B, T, C] with masks [B, T, C]."""
        return coefficients * (1 + masks).relu()
