"""Kaldi's filter bank as a layer: a batch of waveforms to logarithms of energies in bands, on the device."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.lengths import N

_FLOOR = 1.1920928955078125e-07  # what Kaldi takes the logarithm of at least
_POVEY = 0.85  # the power of Hann's window that is Povey's


class FilterBank(nn.Module):
    """Waveforms [B, S] to features [B, T, F], as ``compute-fbank-feats`` makes them without dither.

    Frames lie wholly within the waveform (``snip_edges``); :meth:`frames` says how many there are. Whatever precision
    is around it, it computes in fp32. It holds nothing that a checkpoint would have to keep.

    Arguments
    ---------
    sample_rate : of the waveforms
    n_mels : bands
    frame_length, frame_shift : milliseconds
    low, high : Hertz; ``high`` of 0 and less counts down from half the sample rate
    preemphasis : how much of the sample before is taken away
    scale : what samples are multiplied by; Kaldi's are 16-bit integers, 32768 times what others read

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
        """Frames of so many samples, of which a frame needs ``size``."""
        return (samples - self.size) // self.hop + 1

    def forward(self, signals: Tensor, count: int | None = None) -> Tensor:
        """[B, S] -> [B, T, F], of which the first ``count`` if not all are wanted."""
        with full_precision(signals):
            frames = framed(signals.float() * self.scale, self.size, self.hop, count)
            frames = frames - frames.mean(2, keepdim=True)
            before = torch.cat([frames[..., :1], frames[..., :-1]], dim=2)
            power = spectrum((frames - self.preemphasis * before) * self.window, self.fourier, self.bins)
            return product(power, self.mel).clamp(min=_FLOOR).log()


def full_precision(signals: Tensor) -> contextlib.AbstractContextManager[object]:
    """No autocast within it: the power of a spectrum has a range that half precision loses."""
    kind = signals.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def framed(signals: Tensor, size: int, hop: int, count: int | None = None) -> Tensor:
    """Waveforms [B, S] to windows [B, T, size] that begin every ``hop`` samples, all or so many."""
    count = (signals.shape[1] - size) // hop + 1 if count is None else count
    device = signals.device
    places = torch.arange(count, device=device)[:, None] * hop + torch.arange(size, device=device)
    return signals.index_select(1, places.flatten()).unflatten(1, (count, size))


def spectrum(frames: Tensor, matrix: Tensor, bins: int) -> Tensor:
    """The power [B, T, bins / 2 + 1] of windowed frames [B, T, size]; in an exported graph by a product."""
    if torch.compiler.is_exporting():  # runtimes have no fast transform, some none
        real, imaginary = product(frames, matrix).chunk(2, dim=2)
    else:
        found = torch.view_as_real(torch.fft.rfft(frames, bins))
        real, imaginary = found[..., 0], found[..., 1]
    return real.square() + imaginary.square()


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """[B, T, N] times [N, M]; in an exported graph a convolution, whose weights stay fp32 where matrices get 8 bits."""
    if torch.compiler.is_exporting():
        return functional.conv1d(x.transpose(1, 2), matrix.t()[..., None]).transpose(1, 2)
    return torch.matmul(x, matrix)


def fourier(size: int, bins: int) -> Tensor:
    """Cosines and sines that make the transform of a frame a product with it: [size, 2 (bins / 2 + 1)]."""
    # The product as whole numbers modulo the period keeps the angles exact.
    angles = torch.outer(torch.arange(size), torch.arange(bins // 2 + 1)) % bins
    angles = angles.double() * (2 * math.pi / bins)
    return torch.cat([angles.cos(), -angles.sin()], dim=1).float()


def _mel(sample_rate: int, bins: int, bands: int, low: float, high: float) -> Tensor:
    """Triangles that lie evenly on the mel scale: [bins / 2 + 1, bands]; Kaldi leaves the highest bin out.

    As Kaldi's they are made in fp32, whose rounding is part of what models were trained on.
    """
    top = high if high > 0 else sample_rate / 2 + high
    lowest, highest = (1127.0 * math.log1p(each / 700.0) for each in (low, top))
    step = (highest - lowest) / (bands + 1)
    left, centre, right = (lowest + torch.arange(first, first + bands) * step for first in (0.0, 1.0, 2.0))
    places = 1127.0 * (1.0 + torch.arange(bins // 2 + 1) * (sample_rate / bins) / 700.0).log()[:, None]
    found = torch.minimum((places - left) / (centre - left), (right - places) / (right - centre)).clamp(min=0.0)
    found[-1] = 0.0
    return found
