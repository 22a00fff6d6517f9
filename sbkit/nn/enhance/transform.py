"""Transforms between waveforms and frames of coefficients, which masks are multiplied with."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from sbkit.nn.codec import fourier

#: The energy added to each bin before the logarithm.
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
            raise ValueError(f"size is {size}: it must be a multiple of hop ({hop}), and at least twice as large")
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
        """Coefficients [B, T, C] to the network's inputs [B, T, features_size]."""

    @abstractmethod
    def masked(self, coefficients: Tensor, masks: Tensor) -> Tensor:
        """Multiply coefficients [B, T, C] with masks [B, T, masks_size]."""

    def synthesise(self, coefficients: Tensor) -> Tensor:
        """Coefficients [B, T, C] to overlap-added waveforms [B, (T - 1) * hop + size]."""
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
        taper = fourier.window(size).sqrt()  # whose squares add up to a constant
        energy = taper.square().sum().sqrt().float()  # by which the analysis is divided
        self.register_buffer("analysis", fourier.analysis(size, taper), persistent=False)
        self.register_buffer("synthesis", energy * fourier.synthesis(size, hop, taper), persistent=False)

    def features(self, coefficients: Tensor) -> Tensor:
        real, imaginary = coefficients.chunk(2, dim=2)
        energy = real.square() + imaginary.square() + FLOOR
        weight = energy ** ((self.power - 1) / 2)
        return torch.cat([energy.log() / 4 + 1, real * weight, imaginary * weight], dim=2)

    def masked(self, coefficients: Tensor, masks: Tensor) -> Tensor:
        """Multiply spectra [B, T, C] with complex masks [B, T, C], from which 1 has been subtracted: so an untrained
        network starts near the identity, and not with the inverted signal, which has the same SI-SNR."""
        (real, imaginary), (a, b) = coefficients.chunk(2, dim=2), masks.chunk(2, dim=2)
        a = 1 + a
        return torch.cat([real * a - imaginary * b, real * b + imaginary * a], dim=2)


class LearnedFrames(Frames):
    """A learnt transform, as Conv-TasNet's: coefficients and masks are real, and masks are not negative.

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
        return coefficients.relu()

    def masked(self, coefficients: Tensor, masks: Tensor) -> Tensor:
        return coefficients * (1 + masks).relu()
