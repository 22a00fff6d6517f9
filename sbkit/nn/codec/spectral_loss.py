"""Distances between the spectra of two waveforms at several resolutions, for each utterance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sbkit.nn.codec import fourier
from sbkit.nn.lengths import frame_mean

#: Decibels of one natural logarithm of a magnitude.
DECIBELS = 20 / math.log(10)


class PowerSpectrum(nn.Module):
    """Waveforms [B, S] to power [B, N, bins], with a frame every ``hop``; that of white noise is the noise's power."""

    window: Tensor

    def __init__(self, size: int, hop: int):
        super().__init__()
        self.size, self.hop = size, hop
        window = fourier.window(size)
        self.register_buffer("window", (window / window.square().sum().sqrt()).float(), persistent=False)

    def forward(self, signals: Tensor) -> Tensor:
        spectrum = torch.stft(signals, self.size, self.hop, window=self.window, center=True, pad_mode="constant",
                              return_complex=True)
        return (spectrum.real.square() + spectrum.imag.square()).transpose(1, 2)

    def mean(self, values: Tensor, samples: Tensor) -> Tensor:
        """Compute the mean of [B, N, F] over the real frames of utterances with sample counts [B]: [B]."""
        return frame_mean(values, samples // self.hop + 1)


class MelDistance(nn.Module):
    """The mean distance [B] between the log-magnitudes (natural logarithms) of mel bands of waveforms [B, S].

    Waveforms are 0 beyond their samples [B].
    """

    bands: Tensor

    def __init__(self, sample_rate: int = 16_000, size: int = 640, hop: int = 160, n_mels: int = 80):
        super().__init__()
        self.spectrum = PowerSpectrum(size, hop)
        self.register_buffer("bands", fourier.mel_filters(size, n_mels, sample_rate), persistent=False)

    def forward(self, output: Tensor, target: Tensor, samples: Tensor) -> Tensor:
        distances = _distances(self.spectrum(output) @ self.bands, self.spectrum(target) @ self.bands)
        return self.spectrum.mean(distances, samples)


class SpectralLoss(nn.Module):
    """Waveforms [B, S], targets [B, S] and sample counts [B] to a distance for each utterance [B].

    At each resolution it is the mean distance of log-magnitudes of mel bands, for intelligibility, and of all bins, for
    pitch and voice.

    sizes : samples of a frame at each resolution
    n_mels : mel bands at the finest of these in frequency; others have fewer, in proportion
    bins : weight of the distance of all bins; that of mel bands is 1
    sample_rate : of the waveforms
    """

    def __init__(self, sizes: Sequence[int] = (256, 512, 1024), n_mels: int = 80, bins: float = 0.5,
                 sample_rate: int = 16_000):
        super().__init__()
        self.bins = bins
        self.spectra: Sequence[PowerSpectrum] = nn.ModuleList(  # type: ignore[assignment]  # it doesn't say what it holds
            [PowerSpectrum(size, size // 4) for size in sizes])
        for i, size in enumerate(sizes):
            bands = fourier.mel_filters(size, n_mels * size // max(sizes), sample_rate)
            self.register_buffer(f"bands{i}", bands, persistent=False)

    def forward(self, output: Tensor, target: Tensor, samples: Tensor) -> Tensor:
        total = output.new_zeros(len(output))
        for i, spectrum in enumerate(self.spectra):
            bands, ours = self.get_buffer(f"bands{i}"), spectrum(output)
            with torch.no_grad():
                theirs = spectrum(target)
            total = total + spectrum.mean(_distances(ours @ bands, theirs @ bands), samples)
            if self.bins:
                total = total + self.bins * spectrum.mean(_distances(ours, theirs), samples)
        return total / len(self.spectra)


def _distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """Compute distances between the log-magnitudes of powers."""
    return 0.5 * ((ours + fourier.FLOOR).log() - (theirs + fourier.FLOOR).log()).abs()
