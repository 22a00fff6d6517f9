"""The mel scale: triangular filters that are evenly spaced in pitch as it is heard."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def filters(size: int, bands: int, sample_rate: int) -> Tensor:
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
