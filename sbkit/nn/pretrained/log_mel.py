"""Whisper's features: log-mel energies, limited to 80 dB below an utterance's loudest."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.kaldi import fourier, framed, full_precision, product, spectrum
from sbkit.nn.lengths import N

HOP = 160
_SIZE = 400
_FLOOR, _RANGE = 1e-10, 8.0  # smallest energy; range of its logarithm below the loudest
_LINEAR = 200.0 / 3  # Hertz per mel below 1000 Hz
_RATIO = math.log(6.4) / 27.0  # above 1000 Hz, logarithm of the ratio of frequencies one mel apart


class LogMel(nn.Module):
    """Waveforms [B, S] to features [B, T, F], a frame every 160 samples.

    A waveform is followed by silence, as in Whisper's windows of 30 seconds, so an utterance's features are the same in
    a batch that is padded with zeros.

    n_mels : number of bands
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
        """Return the number of frames for a number of samples."""
        return (samples + HOP - 1) // HOP

    def forward(self, signals: Tensor, more: int = 0) -> Tensor:
        """[B, S] with S of at least 201 -> [B, T + more, F]; ``more`` frames of silence follow."""
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
    """Make triangular filters of equal area on Slaney's mel scale: [201, bands]."""
    def mels(hertz: float) -> float:
        return hertz / _LINEAR if hertz < 1000.0 else 15.0 + math.log(hertz / 1000.0) / _RATIO

    corners = torch.linspace(0.0, mels(sample_rate / 2), bands + 2, dtype=torch.float64)
    corners = torch.where(corners < 15.0, corners * _LINEAR, 1000.0 * torch.exp((corners - 15.0) * _RATIO))
    places = torch.linspace(0.0, sample_rate / 2, _SIZE // 2 + 1, dtype=torch.float64)[:, None]
    left, centre, right = corners[:-2], corners[1:-1], corners[2:]
    filters = torch.minimum((places - left) / (centre - left), (right - places) / (right - centre)).clamp(min=0.0)
    return (filters * (2.0 / (right - left))).float()
