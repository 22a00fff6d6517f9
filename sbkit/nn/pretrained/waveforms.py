"""The first steps of encoders on waveforms, computed from each utterance's own samples and frames only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.lengths import N, lengths_to_mask

_EPSILON = 1e-7  # of transformers' feature extractors


class Strides:
    """The number of frames that convolutions without padding make of a number of samples.

    Arguments
    ---------
    kernels, strides : sizes and strides of the layers, in order

    >>> Strides([10, 3], [5, 2])(25)
    1
    """

    def __init__(self, kernels: Sequence[int], strides: Sequence[int]):
        self.layers = list(zip(kernels, strides, strict=True))
        self.least = 1
        """The smallest number of samples that makes a frame."""
        for kernel, stride in reversed(self.layers):
            self.least = (self.least - 1) * stride + kernel

    def __call__(self, samples: N) -> N:
        """Return the number of frames; at least 1, as shorter inputs are padded."""
        return self.counts(samples)[-1]

    def counts(self, samples: N) -> list[N]:
        """Return the number of frames after each layer."""
        count, counts = samples.clamp(min=self.least) if isinstance(samples, Tensor) else max(samples, self.least), []
        for kernel, stride in self.layers:
            count = (count - kernel) // stride + 1
            counts.append(count)
        return counts


def at_least(signals: Tensor, least: int) -> Tensor:
    """Pad waveforms [B, S] with zeros to at least ``least`` samples."""
    return functional.pad(signals, (0, least - signals.shape[1])) if signals.shape[1] < least else signals


def normalized(signals: Tensor, samples: Tensor) -> Tensor:
    """Normalise waveforms [B, S] to mean 0 and variance 1 over their own samples [B]; padding becomes zero."""
    inside = lengths_to_mask(samples, signals.shape[1])
    count = samples.clamp(min=1)[:, None]
    signals = signals.float()
    mean = signals.masked_fill(~inside, 0.0).sum(1, keepdim=True) / count
    centred = (signals - mean).masked_fill(~inside, 0.0)
    return centred * torch.rsqrt(centred.square().sum(1, keepdim=True) / count + _EPSILON)


def channel_norm(norm: nn.GroupNorm, states: Tensor, frames: Tensor) -> Tensor:
    """Apply a GroupNorm with one channel per group to [B, C, T], over each utterance's own frames [B]."""
    inside = lengths_to_mask(frames, states.shape[2])[:, None]
    count = frames[:, None, None]
    states = states.float()
    centred = states - states.masked_fill(~inside, 0.0).sum(2, keepdim=True) / count
    variance = centred.masked_fill(~inside, 0.0).square().sum(2, keepdim=True) / count
    return centred * (torch.rsqrt(variance + norm.eps) * norm.weight[:, None]) + norm.bias[:, None]


def convolved(layers: Iterable[Any], signals: Tensor, counts: Sequence[Tensor]) -> Tensor:
    """Run waveforms [B, S] through convolutions, whose frame counts [B] are ``counts``: [B, T, C]."""
    states = signals[:, None]
    for layer, frames in zip(layers, counts, strict=True):
        states, norm = layer.conv(states), getattr(layer, "layer_norm", None)
        if isinstance(norm, nn.GroupNorm):
            states = channel_norm(norm, states, frames)
        elif norm is not None:
            states = norm(states.transpose(1, 2)).transpose(1, 2)
        states = layer.activation(states)
    return states.transpose(1, 2)
