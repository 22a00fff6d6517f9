"""Kaldi's log-mel filter bank as a layer, for batches of waveforms on any device."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.lengths import N

_FLOOR = 1.1920928955078125e-07  # smallest energy that Kaldi takes the logarithm of
_POVEY = 0.85  # Povey's window is Hann's to this power


class FilterBank(nn.Module):
    """Waveforms [B, S] to features [B, T, F], equal to those of ``compute-fbank-feats`` without dither.

    Frames lie wholly within the waveform (``snip_edges``); :meth:`frames` counts them. It computes in fp32 under
    autocast too, and adds nothing to checkpoints.

    Arguments
    ---------
    sample_rate : of the waveforms
    n_mels : number of bands
    frame_length, frame_shift : milliseconds
    low, high : limits of the bands in Hertz; 0 or a negative ``high`` is relative to half the sample rate
    preemphasis : share of the previous sample that is subtracted
    scale : factor for the samples; 32768 for models trained on Kaldi's features of 16-bit samples

    >>> FilterBank()(torch.randn(2, 16_000)).shape
    torch.Size([2, 98, 80])
    """

    window: Tensor
    fourier: Tensor
    mel: Tensor

    def __init__(self, sample_rate: int = 16_000, n_mels: int = 80, frame_length: float = 25.0,
                 frame_shift: float = 10.0, low: float = 20.0, high: float = 0.0, preemphasis: float = 0.97,
                 scale: float = 1.0):
        super().__init__()
        self.size, self.hop = round(sample_rate * frame_length / 1000), round(sample_rate * frame_shift / 1000)
        self.bins = 1 << (self.size - 1).bit_length()
        self.preemphasis, self.scale = preemphasis, scale
        window = torch.hann_window(self.size, periodic=False, dtype=torch.float64).pow(_POVEY)
        self.register_buffer("window", window.float(), persistent=False)
        self.register_buffer("fourier", fourier(self.size, self.bins), persistent=False)
        self.register_buffer("mel", _mel(sample_rate, self.bins, n_mels, low, high), persistent=False)

    def frames(self, samples: N) -> N:
        """Return the number of frames for a number of samples, at least ``size``."""
        return (samples - self.size) // self.hop + 1

    def forward(self, signals: Tensor, count: int | None = None) -> Tensor:
        """[B, S] -> [B, T, F]; with ``count``, only that many frames."""
        with full_precision(signals):
            frames = framed(signals.float() * self.scale, self.size, self.hop, count)
            frames = frames - frames.mean(2, keepdim=True)
            before = torch.cat([frames[..., :1], frames[..., :-1]], dim=2)
            power = spectrum((frames - self.preemphasis * before) * self.window, self.fourier, self.bins)
            return product(power, self.mel).clamp(min=_FLOOR).log()


def full_precision(signals: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context without autocast, since spectral power exceeds the range of half precision."""
    kind = signals.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def framed(signals: Tensor, size: int, hop: int, count: int | None = None) -> Tensor:
    """Cut waveforms [B, S] into frames [B, T, size] that start every ``hop`` samples; all, or ``count``."""
    count = (signals.shape[1] - size) // hop + 1 if count is None else count
    device = signals.device
    places = torch.arange(count, device=device)[:, None] * hop + torch.arange(size, device=device)
    return signals.index_select(1, places.flatten()).unflatten(1, (count, size))


def spectrum(frames: Tensor, matrix: Tensor, bins: int) -> Tensor:
    """Compute the power spectrum [B, T, bins / 2 + 1] of windowed frames [B, T, size].

    matrix : as made by :func:`fourier`, used in exported graphs
    """
    if torch.compiler.is_exporting():  # runtimes have a slow Fourier transform or none
        real, imaginary = product(frames, matrix).chunk(2, dim=2)
    else:
        parts = torch.view_as_real(torch.fft.rfft(frames, bins))
        real, imaginary = parts[..., 0], parts[..., 1]
    return real.square() + imaginary.square()


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply [B, T, N] by [N, M]; as a convolution in exported graphs, since quantization to 8 bits leaves those."""
    if torch.compiler.is_exporting():
        return functional.conv1d(x.transpose(1, 2), matrix.t()[..., None]).transpose(1, 2)
    return torch.matmul(x, matrix)


def fourier(size: int, bins: int) -> Tensor:
    """Make the matrix [size, 2 (bins / 2 + 1)] that takes a frame to the real and imaginary parts of its spectrum."""
    # Integers modulo the period keep the angles exact.
    angles = torch.outer(torch.arange(size), torch.arange(bins // 2 + 1)) % bins
    angles = angles.double() * (2 * math.pi / bins)
    return torch.cat([angles.cos(), -angles.sin()], dim=1).float()


def _mel(sample_rate: int, bins: int, bands: int, low: float, high: float) -> Tensor:
    """Make triangular filters, evenly spaced on the mel scale: [bins / 2 + 1, bands].

    As in Kaldi, the highest bin is left out, and filters are computed in fp32: models were trained with its rounding.
    """
    top = high if high > 0 else sample_rate / 2 + high
    lowest, highest = (1127.0 * math.log1p(each / 700.0) for each in (low, top))
    step = (highest - lowest) / (bands + 1)
    left, centre, right = (lowest + torch.arange(first, first + bands) * step for first in (0.0, 1.0, 2.0))
    places = 1127.0 * (1.0 + torch.arange(bins // 2 + 1) * (sample_rate / bins) / 700.0).log()[:, None]
    filters = torch.minimum((places - left) / (centre - left), (right - places) / (right - centre)).clamp(min=0.0)
    filters[-1] = 0.0
    return filters
