"""Log-mel features made of a convolution and a matrix product, the same alone and in a batch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.codec import fourier
from sbkit.nn.kaldi import full_precision
from sbkit.nn.lengths import lengths_to_mask

#: Power below which a band counts as silent, 60 dB below that of noise at full scale.
FLOOR = 1e-6


class LogMel(nn.Module):
    """Waveforms [B, S] and sample counts [B] to log-mel features [B, T * fold, F] and code frames [B].

    A code frame stands for ``hop * fold`` samples; the last one may reach beyond the end, into silence. Features of
    padding are 0. There are no statistics of an utterance, so that a part of one has the features that it has in
    the whole.

    Arguments
    ---------
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
        fourier.check(size, hop)
        self.sample_rate, self.n_mels, self.hop, self.size, self.fold = sample_rate, n_mels, hop, size, fold
        self.register_buffer("basis", fourier.analysis(size).t()[:, None].contiguous(), persistent=False)
        self.register_buffer("bands", fourier.mel_filters(size, n_mels, sample_rate), persistent=False)

    @property
    def stride(self) -> int:
        """Samples of a code frame."""
        return self.hop * self.fold

    @property
    def frame_rate(self) -> float:
        """Code frames in a second."""
        return self.sample_rate / self.stride

    def frames(self, samples: Tensor) -> Tensor:
        """Code frames for sample counts."""
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
