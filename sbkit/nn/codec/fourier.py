"""Fourier transforms and mel filters as matrices, which are fast in every runtime, and both ends of a codec that use
them: log-mel features, and a head that outputs waveforms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.kaldi import full_precision
from sbkit.nn.lengths import lengths_to_mask


def analysis(size: int, taper: Tensor | None = None) -> Tensor:
    """Make the matrix [size, 2 * bins] to the real and imaginary parts of windowed frames, bins = size // 2 + 1.

    The power of each bin of white noise is that of the noise. ``taper`` is the window; None: Hann's.
    """
    at, bins = torch.arange(size, dtype=torch.float64), torch.arange(size // 2 + 1, dtype=torch.float64)
    angle = 2 * math.pi * at[:, None] * bins / size
    taper = window(size) if taper is None else taper
    return (taper[:, None] / taper.square().sum().sqrt() * torch.cat([angle.cos(), -angle.sin()], dim=1)).float()


def synthesis(size: int, hop: int, taper: Tensor | None = None) -> Tensor:
    """Make the inverse matrix [2 * bins, size], windowed again and scaled for overlap-add every ``hop`` samples."""
    at, bins = torch.arange(size, dtype=torch.float64), torch.arange(size // 2 + 1, dtype=torch.float64)
    angle = 2 * math.pi * bins[:, None] * at / size
    twice = torch.full_like(bins, 2.0)  # for negative frequencies, which mirror the positive ones
    twice[0] = twice[-1] = 1.0
    weighted = torch.cat([twice[:, None] * angle.cos(), -twice[:, None] * angle.sin()]) / size
    taper = window(size) if taper is None else taper
    return (weighted * taper * hop / taper.square().sum()).float()


def overlapped(frames: Tensor, hop: int) -> Tensor:
    """Overlap-add frames [B, N, size] that begin every ``hop`` samples: [B, (N - 1) * hop + size]."""
    pieces = frames.unflatten(2, (-1, hop))  # [B, N, overlap, hop]
    overlap = pieces.shape[2]
    shifted = [functional.pad(pieces[:, :, i], (0, 0, i, overlap - 1 - i)) for i in range(overlap)]
    return torch.stack(shifted).sum(0).flatten(1)


def check(size: int, hop: int) -> None:
    """Raise unless frames of ``size`` samples every ``hop`` overlap evenly and symmetrically."""
    if size % hop or (size - hop) % 2:
        raise ValueError(f"size is {size}: it must be a multiple of hop ({hop}), and larger by an even number")


def window(size: int) -> Tensor:
    """Make a periodic Hann window [size] in float64."""
    return torch.hann_window(size, dtype=torch.float64)


def mel_filters(size: int, bands: int, sample_rate: int) -> Tensor:
    """Make triangular filters [bins, bands] for a transform of ``size`` samples, from 0 to half the sample rate.

    A band narrower than a bin gets the bin nearest to its centre, so that none is empty.
    """
    top = 2595 * math.log10(1 + sample_rate / 2 / 700)  # mel
    edges = torch.tensor([700 * (10 ** (top * i / (bands + 1) / 2595) - 1) for i in range(bands + 2)],
                         dtype=torch.float64)
    bins = torch.arange(size // 2 + 1, dtype=torch.float64)[:, None] * (sample_rate / size)
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    weights = torch.minimum(rising, falling).clamp(min=0)
    nearest = torch.arange(len(bins))[:, None] == (bins - edges[1:-1]).abs().argmin(0)
    weights = torch.where(weights.sum(0) > 0, weights, nearest.double())
    return (weights / weights.sum(0)).float()


#: Power below which a band, or a bin, counts as silent, 60 dB below that of noise at full scale.
FLOOR = 1e-6


class LogMel(nn.Module):
    """Waveforms [B, S] and sample counts [B] to log-mel features [B, T * fold, F] and code frames [B].

    A code frame has ``hop * fold`` samples; the last one may reach beyond the end, into silence. Features of padding
    are 0. There are no statistics of an utterance, so that a part of it has the same features as in the whole.

    sample_rate : of the waveforms
    n_mels : F
    hop : samples between two feature frames
    size : samples of a feature frame, a multiple of ``hop``
    fold : feature frames in a code frame
    """

    basis: Tensor
    bands: Tensor

    def __init__(self, sample_rate: int = 16_000, n_mels: int = 80, hop: int = 160, size: int = 640, fold: int = 2):
        super().__init__()
        check(size, hop)
        self.sample_rate, self.n_mels, self.hop, self.size, self.fold = sample_rate, n_mels, hop, size, fold
        self.register_buffer("basis", analysis(size).t()[:, None].contiguous(), persistent=False)
        self.register_buffer("bands", mel_filters(size, n_mels, sample_rate), persistent=False)

    @property
    def stride(self) -> int:
        """Samples in a code frame."""
        return self.hop * self.fold

    @property
    def frame_rate(self) -> float:
        """Code frames in a second."""
        return self.sample_rate / self.stride

    def frames(self, samples: Tensor) -> Tensor:
        """Return the number of code frames for sample counts."""
        return (samples + self.stride - 1) // self.stride

    def forward(self, signals: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        frames, count = self.frames(samples), (signals.shape[1] + self.stride - 1) // self.stride
        with full_precision(signals):
            signals = signals.float() * lengths_to_mask(samples, signals.shape[1])
            around = (self.size - self.hop) // 2
            signals = functional.pad(signals, (around, around + count * self.stride - signals.shape[1]))
            real, imaginary = functional.conv1d(signals[:, None], self.basis, stride=self.hop).chunk(2, dim=1)
            power = (real.square() + imaginary.square()).transpose(1, 2) @ self.bands
            return (power + FLOOR).log() * lengths_to_mask(frames * self.fold, count * self.fold)[..., None], frames


#: Bounds of a magnitude's logarithm: above any speech, and silence.
LOUDEST, SILENT = 5.0, -12.0


class WaveHead(nn.Module):
    """States [B, N, C] and frame counts [B] to waveforms [B, N * hop], 0 beyond an utterance's frames.

    A linear layer outputs each frame's log-magnitudes and phases; their inverse Fourier transforms are windowed and
    overlap-added. This only needs matrix products and sums of shifted frames, which any runtime has.

    input_size : C
    hop : samples between two frames
    size : samples of a frame, a multiple of ``hop``
    """

    basis: Tensor

    def __init__(self, input_size: int, hop: int = 160, size: int = 640):
        super().__init__()
        check(size, hop)
        self.input_size, self.hop, self.size, self.bins = input_size, hop, size, size // 2 + 1
        self.linear = nn.Linear(input_size, 2 * self.bins)
        self.register_buffer("basis", synthesis(size, hop), persistent=False)

    def forward(self, states: Tensor, frames: Tensor) -> Tensor:
        level, phase = self.linear(states).float().split(self.bins, dim=2)
        with full_precision(states):
            magnitude = level.clamp(SILENT, LOUDEST).exp() * lengths_to_mask(frames, states.shape[1])[..., None]
            spectrum = torch.cat([magnitude * phase.cos(), magnitude * phase.sin()], dim=2)
            sound = self.overlapped(spectrum @ self.basis)
        return sound * lengths_to_mask(frames * self.hop, sound.shape[1])

    def overlapped(self, frames: Tensor) -> Tensor:
        """Overlap-add frames [B, N, size], each centred on its ``hop`` samples: [B, N * hop]."""
        sound, around = overlapped(frames, self.hop), (self.size - self.hop) // 2
        return sound[:, around:sound.shape[1] - around]
