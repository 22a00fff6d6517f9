"""Feature front ends as matrix products, so that an exported graph takes waveforms and every runtime runs it fast.

A Fourier transform over frames of a fixed size is a product with a fixed matrix: a convolution with windowed cosines
and sines as kernels. ``torch.stft`` would become an operator for which ONNX Runtime has no fast kernel on a CPU and
none at all on a GPU.
"""

from __future__ import annotations

import copy
import math

import torch
from speechbrain.lobes import features as lobes
from speechbrain.processing.features import ContextWindow, InputNormalization
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.nn.accelerate import FASTER
from sbkit.nn.fast.front_end import FixedNormalization
from sbkit.nn.kaldi import fourier
from sbkit.nn.lengths import feature_frames, lengths_to_mask, takes_lengths

_SILENCE = -1e4  # dB; below any frame, so that padding is never the loudest


class Features(nn.Module):
    """Waveforms [B, S] and sample counts [B] to features [B, T, F] and frame counts [B].

    An utterance's features don't depend on its batch.

    features : ``speechbrain.lobes.features.Fbank`` or ``MFCC``
    hop_samples : samples between two frames
    """

    fourier: Tensor
    mel: Tensor
    cosine: Tensor | None

    def __init__(self, features: lobes.Fbank | lobes.MFCC, hop_samples: int):
        super().__init__()
        stft, bank = features.compute_STFT, features.compute_fbanks
        name = type(features).__name__
        for value, expected, what in (
            (stft.center, True, "center"), (stft.pad_mode, "constant", "pad_mode"), (stft.onesided, True, "onesided"),
            (bank.log_mel, True, "log_mel"),
        ):
            if value != expected:
                raise SbkitError("not-exportable", f"the feature front end {name} can't be exported: {what} is "
                                 f"{value!r}, and only {expected!r} gives each utterance the same frames alone and in "
                                 "a batch", hint=f"train with {what}: {expected!r}", key=what, value=value)
        if stft.hop_length != hop_samples:
            raise SbkitError("not-exportable",
                             f"the recipe's hop_length is {hop_samples} samples, but {name}'s is {stft.hop_length}",
                             hint=f"give {name} `hop_length: !ref <hop_length>`", key="hop_length", value=hop_samples)
        self.hop, self.size = stft.hop_length, stft.n_fft
        window = torch.zeros(stft.n_fft, dtype=torch.float64)
        left = (stft.n_fft - stft.win_length) // 2  # torch.stft centres a short window
        window[left : left + stft.win_length] = stft.window.double()
        if stft.normalized_stft:
            window /= math.sqrt(stft.n_fft)
        # Kernels [2 * bins, 1, n_fft] of a convolution: windowed cosines, then sines.
        waves = fourier(stft.n_fft, stft.n_fft, torch.float64).t() * window
        self.register_buffer("fourier", waves.float()[:, None].contiguous())
        linear = copy.deepcopy(bank).eval()
        linear.log_mel = False
        with torch.no_grad():  # the filters [F, bins, 1], by applying the bank to each bin alone
            self.register_buffer("mel", linear(torch.eye(bank.n_stft)[None])[0].t().contiguous()[..., None])
        self.amin, self.multiplier, self.top_db = bank.amin, bank.multiplier, bank.top_db
        self.offset = bank.multiplier * bank.db_multiplier
        cosine = getattr(features, "compute_dct", None)
        self.register_buffer("cosine", None if cosine is None else cosine.dct_mat.t().contiguous()[..., None])
        self.deltas = copy.deepcopy(features.compute_deltas) if features.deltas else None
        self.context: ContextWindow | None = None
        if features.context:
            self.context = copy.deepcopy(features.context_window)
            width = bank.n_mels if cosine is None else cosine.dct_mat.shape[1]
            self.context(torch.zeros(1, 1, width * (3 if features.deltas else 1)))  # builds its kernel

    def forward(self, signals: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S], [B] -> [B, T, F], [B]; values beyond an utterance's end are undefined."""
        signals = signals.masked_fill(~lengths_to_mask(samples, signals.shape[1]), 0.0)
        waves = functional.conv1d(signals[:, None], self.fourier, stride=self.hop, padding=self.size // 2)
        real, imaginary = waves.chunk(2, dim=1)
        bands = functional.conv1d(real.square() + imaginary.square(), self.mel)  # [B, F, T]
        frames = samples // self.hop + 1
        level = self.multiplier * torch.log10(bands.clamp(min=self.amin)) - self.offset
        inside = lengths_to_mask(frames, bands.shape[2])[:, None]
        loudest = level.masked_fill(~inside, _SILENCE).amax(dim=(1, 2), keepdim=True)
        level = torch.maximum(level, loudest - self.top_db)
        if self.cosine is not None:
            level = functional.conv1d(level, self.cosine)
        feats = level.transpose(1, 2)
        # Deltas and context frames are, at an utterance's end, as if the batch ended there.
        if self.deltas is not None:
            first = self.deltas(_repeat_last(feats, frames))
            second = self.deltas(_repeat_last(first, frames))
            feats = torch.cat([feats, first, second], dim=2)
        if self.context is not None:
            feats = self.context(feats.masked_fill(~lengths_to_mask(frames, feats.shape[1])[..., None], 0.0))
        return feats, frames


class TracedFeatures(nn.Module):
    """Any other front end [B, S] -> [B, T, F], unchanged; :func:`refuse_transforms` checks the traced graph."""

    def __init__(self, features: nn.Module, hop_samples: int):
        super().__init__()
        self.inner = features
        self.hop = hop_samples
        self.takes_lengths = takes_lengths(features)

    def forward(self, signals: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S], [B] -> [B, T, F], [B]."""
        feats = self.inner(signals, samples) if self.takes_lengths else self.inner(signals)
        return feats, feature_frames(self.inner, samples, self.hop)


def express(features: nn.Module, hop_samples: int) -> nn.Module:
    """Turn a front end into a module that can be exported; raises ``SbkitError`` if that is impossible."""
    if type(features) in (lobes.Fbank, FASTER[lobes.Fbank], lobes.MFCC):
        return Features(features, hop_samples).eval()
    return TracedFeatures(features, hop_samples).eval()


def refuse_transforms(program: torch.export.ExportedProgram, name: str) -> None:
    """Refuse a traced graph that contains Fourier transforms or complex numbers."""
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue  # a buffer could have such a name
        target = str(node.target)
        value = node.meta.get("val")
        if "stft" in target or "fft" in target or (isinstance(value, Tensor) and value.is_complex()):
            raise SbkitError("not-exportable", f"the feature front end {name} can't be exported: it uses "
                             f"{target.split('.')[1]}, for which runtimes have no fast kernel",
                             hint="use Fbank or MFCC of speechbrain.lobes.features, or one made of real-valued "
                                  "convolutions and matrix products")


def _repeat_last(feats: Tensor, frames: Tensor) -> Tensor:
    """Repeat each utterance's last frame to the end of the batch: [B, T, F]."""
    time = torch.arange(feats.shape[1], device=feats.device)
    index = torch.minimum(time[None], frames[:, None] - 1)
    return feats.gather(1, index[..., None].expand(-1, -1, feats.shape[2]))


class Normalization(nn.Module):
    """SpeechBrain's ``InputNormalization`` with frame counts instead of relative lengths, so the same in any batch."""

    mean: Tensor
    spread: Tensor

    def __init__(self, norm: InputNormalization):
        super().__init__()
        self.sentence = norm.norm_type == "sentence"
        self.deviation = norm.std_norm
        self.epsilon = norm.epsilon
        if norm.norm_type == "batch":
            raise SbkitError("not-exportable", "normalize: norm_type 'batch' makes an utterance's features depend on "
                             "its batch, so the model can't be exported as a function of one waveform",
                             hint="train with norm_type: sentence or global", key="normalize")
        if not self.sentence:
            if not int(norm.count):
                raise SbkitError("no-statistics", "normalize: norm_type is 'global', but no statistics were saved",
                                 hint="add normalize to the checkpointer's recoverables", key="normalize")
            self.register_buffer("mean", norm.glob_mean.detach().clone().float())
            spread = norm.glob_std if norm.std_norm else torch.ones_like(norm.glob_std)
            self.register_buffer("spread", spread.detach().clone().float().clamp(min=norm.epsilon))

    def forward(self, feats: Tensor, frames: Tensor) -> Tensor:
        """[B, T, F], [B] -> [B, T, F]."""
        if not self.sentence:
            return (feats - self.mean) / self.spread
        inside = lengths_to_mask(frames, feats.shape[1])[..., None]
        count = frames[:, None, None].to(feats.dtype)
        centred = feats - feats.masked_fill(~inside, 0.0).sum(1, keepdim=True) / count
        if not self.deviation:
            return centred
        variance = centred.masked_fill(~inside, 0.0).square().sum(1, keepdim=True) / count
        return centred / variance.sqrt().clamp(min=self.epsilon)


class OtherNormalization(nn.Module):
    """Any other normalisation that takes features and relative lengths."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.inner = norm

    def forward(self, feats: Tensor, frames: Tensor) -> Tensor:
        """[B, T, F], [B] -> [B, T, F]."""
        return self.inner(feats, frames / feats.shape[1])


def normalization(norm: nn.Module | None) -> nn.Module | None:
    """Turn the recipe's ``normalize`` into a module that can be exported; None stays None."""
    if norm is None:
        return None
    if is_input_normalization(norm):
        return Normalization(norm).eval()
    return OtherNormalization(norm).eval()


def is_input_normalization(norm: object) -> bool:
    """Whether this is SpeechBrain's ``InputNormalization`` or an equivalent of ours, not another subclass."""
    return type(norm) in (InputNormalization, FASTER[InputNormalization], FixedNormalization)
