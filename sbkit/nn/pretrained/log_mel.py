"""Whisper's features: logarithms of mel energies, the loudest 80 dB of an utterance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.kaldi import fourier, framed, full_precision, product, spectrum
from sbkit.nn.lengths import N

HOP = 160
_SIZE = 400
_FLOOR, _RANGE = 1e-10, 8.0  # of the energy, and of its logarithm below the loudest
_LINEAR = 200.0 / 3  # Hertz of a mel below 1000 Hz, above which mels grow by this ratio:
_RATIO = math.log(6.4) / 27.0


class LogMel(nn.Module):
    """Waveforms [B, S] to features [B, T, F], a frame for every 160 samples and as many more as are asked for.

    Behind a waveform is silence, as in Whisper's windows of 30 seconds; so an utterance with zeros behind it, in a
    batch, comes out as it does alone.

    n_mels : bands
    """

    window: Tensor
    fourier: Tensor
    mel: Tensor

    def __init__(self, n_mels: int = 80, sample_rate: int = 16_000):
        super().__init__()
        self.register_buffer("window", torch.hann_window(_SIZE, dtype=torch.float64).float(), persistent=False)
        self.register_buffer("fourier", fourier(_SIZE, _SIZE), persistent=False)
        self.register_buffer("mel", _mel(n_mels, sample_rate), persistent=False)

    @staticmethod
    def frames(samples: N) -> N:
        """Frames of so many samples."""
        return (samples + HOP - 1) // HOP

    def forward(self, signals: Tensor, more: int = 0) -> Tensor:
        """[B, S], of 201 samples at least, -> [B, T + more, F]."""
        with full_precision(signals):
            signals = signals.float()
            half = _SIZE // 2
            behind = (self.frames(signals.shape[1]) + more - 1) * HOP + half - signals.shape[1]
            before = signals[:, 1:half + 1].flip(1)
            whole = torch.cat([before, functional.pad(signals, (0, behind))], dim=1)
            power = spectrum(framed(whole, _SIZE, HOP) * self.window, self.fourier, _SIZE)
            level = product(power, self.mel).clamp(min=_FLOOR).log10()
            loudest = level.amax(dim=(1, 2), keepdim=True)
            return (torch.maximum(level, loudest - _RANGE) + 4.0) / 4.0


def _mel(bands: int, sample_rate: int) -> Tensor:
    """Triangles of equal area on Slaney's mel scale: [201, bands]."""
    def mels(hertz: float) -> float:
        return hertz / _LINEAR if hertz < 1000.0 else 15.0 + math.log(hertz / 1000.0) / _RATIO

    corners = torch.linspace(0.0, mels(sample_rate / 2), bands + 2, dtype=torch.float64)
    corners = torch.where(corners < 15.0, corners * _LINEAR, 1000.0 * torch.exp((corners - 15.0) * _RATIO))
    places = torch.linspace(0.0, sample_rate / 2, _SIZE // 2 + 1, dtype=torch.float64)[:, None]
    left, centre, right = corners[:-2], corners[1:-1], corners[2:]
    found = torch.minimum((places - left) / (centre - left), (right - places) / (right - centre)).clamp(min=0.0)
    return (found * (2.0 / (right - left))).float()
