"""Fourier transforms of frames and bands of mel as matrices, which every runtime multiplies fast."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def analysis(size: int, taper: Tensor | None = None) -> Tensor:
    """The real and imaginary parts of the transform of windowed frames: [size, 2 * bins], bins = size // 2 + 1.

    Of white noise, the power of each bin is that of the noise. ``taper`` is another window than Hann's.
    """
    at, bins = torch.arange(size, dtype=torch.float64), torch.arange(size // 2 + 1, dtype=torch.float64)
    angle = 2 * math.pi * at[:, None] * bins / size
    taper = window(size) if taper is None else taper
    return (taper[:, None] / taper.square().sum().sqrt() * torch.cat([angle.cos(), -angle.sin()], dim=1)).float()


def synthesis(size: int, hop: int, taper: Tensor | None = None) -> Tensor:
    """The inverse, windowed again and scaled so that frames every ``hop`` samples add up: [2 * bins, size]."""
    at, bins = torch.arange(size, dtype=torch.float64), torch.arange(size // 2 + 1, dtype=torch.float64)
    angle = 2 * math.pi * bins[:, None] * at / size
    twice = torch.full_like(bins, 2.0)  # for the bins above the middle, which mirror those below
    twice[0] = twice[-1] = 1.0
    weighted = torch.cat([twice[:, None] * angle.cos(), -twice[:, None] * angle.sin()]) / size
    taper = window(size) if taper is None else taper
    return (weighted * taper * hop / taper.square().sum()).float()


def check(size: int, hop: int) -> None:
    """Raise unless frames of ``size`` samples every ``hop`` overlap evenly and reach as far before as behind."""
    if size % hop or (size - hop) % 2:
        raise ValueError(f"size is {size}: it must be a multiple of hop ({hop}), and an even number more")


def window(size: int) -> Tensor:
    """A periodic Hann window [size] in float64."""
    return torch.hann_window(size, dtype=torch.float64)


def mel_filters(size: int, bands: int, sample_rate: int) -> Tensor:
    """Triangles [bins, bands] over the bins of a transform of ``size`` samples, from 0 to half the sample rate.

    A band that is narrower than a bin has the bin nearest to its centre, so that none is empty.
    """
    top = _mel(sample_rate / 2)
    edges = torch.tensor([_hertz(top * i / (bands + 1)) for i in range(bands + 2)], dtype=torch.float64)
    bins = torch.arange(size // 2 + 1, dtype=torch.float64)[:, None] * (sample_rate / size)
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    weights = torch.minimum(rising, falling).clamp(min=0)
    nearest = torch.arange(len(bins))[:, None] == (bins - edges[1:-1]).abs().argmin(0)
    weights = torch.where(weights.sum(0) > 0, weights, nearest.double())
    return (weights / weights.sum(0)).float()


def _mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)


def _hertz(mel: float) -> float:
    return 700 * (10 ** (mel / 2595) - 1)
