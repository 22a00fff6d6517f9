"""The encoders of Parakeet and of LASR: Conformers over log-mel features."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.kaldi import fourier, framed, full_precision, kaldi_filters, product, slaney_filters, spectrum
from sbkit.nn.lengths import N, centred, lengths_to_mask
from sbkit.nn.pretrained.networks import EncoderOptions, Network, at_least, lowest, make, padded, shorter
from sbkit.nn.pretrained.source import Settings

_RATE, _HOP, _SIZE, _BINS = 16_000, 160, 400, 512


class Conformer(Network):
    """The base of both: subsampling convolutions over features, then Conformer layers.

    Batch normalisation keeps the statistics of pretraining: those of a batch would include its padding.
    """

    prefixes = ("encoder.",)
    reinitialised = ()
    layers: nn.ModuleList
    window: Tensor
    fourier: Tensor
    """The matrix in fp32, and its rounding error, since an export makes all buffers fp32."""
    min_samples: int
    """The smallest number of samples with a state."""
    spectral_dtype = torch.float32
    """The dtype of the Fourier transform."""

    def __init__(self, settings: Settings, options: EncoderOptions, config: Any):  # as in Network
        super().__init__(settings, options, config)
        self.register_buffer("window", torch.hann_window(_SIZE, periodic=False, dtype=torch.float64).float(),
                             persistent=False)
        exact = fourier(_SIZE, _BINS, torch.float64)
        self.register_buffer("fourier", torch.stack([exact.float(), (exact - exact.float()).float()]), persistent=False)
        encoder = make(self.auto, config)
        for name, part in encoder.named_children():
            self.add_module(name, part)
        self.layers = lowest(encoder.layers, options.layers)
        self.strided = [layer for layer in self.get_submodule(self.front[0]).modules()
                        if isinstance(layer, (nn.Conv1d, nn.Conv2d))]
        self.dropout: float = config.dropout

    def train(self, mode: bool = True) -> Conformer:
        """Set the mode of all modules except batch normalisation."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self

    @abstractmethod
    def feature_frames(self, samples: N) -> N:
        """Return the number of frames of features for at least ``min_samples`` samples."""

    @abstractmethod
    def features(self, signals: Tensor, samples: Tensor) -> Tensor:
        """Waveforms [B, S] and sample counts [B] to features [B, T, F]."""

    @abstractmethod
    def subsampled(self, feats: Tensor, counts: Tensor) -> tuple[Tensor, Any]:  # whatever the layers take
        """Features [B, T, F] of ``counts`` [B] frames to [B, T', D] and position embeddings."""

    def frames(self, samples: N) -> N:
        count = self.feature_frames(at_least(samples, self.min_samples))
        for conv in self.strided:
            count = shorter(conv, count)
        return count

    def forward(self, signals: Tensor, samples: Tensor) -> Tensor:
        """[B, S], [B] -> [B, T, D]."""
        signals = padded(signals, self.min_samples)
        samples = at_least(samples, self.min_samples)
        counts = self.feature_frames(samples)
        with full_precision(signals):
            feats = self.features(signals.float(), samples)
        with self.front_context():
            states, positions = self.subsampled(self.masked(feats, counts), counts)
        states = functional.dropout(states, self.dropout, self.training)
        inside = lengths_to_mask(self.frames(samples), states.shape[1])[:, None, None]
        for layer in self.layers:
            states = layer(states, attention_mask=inside, position_embeddings=positions)
        norm: Any = getattr(self, "out_norm", None)  # LASR's
        return states if norm is None else norm(states)

    def power(self, signals: Tensor) -> Tensor:
        """Waveforms [B, S] to the power spectra [B, T, N] of whole frames."""
        frames = framed(signals, _SIZE, _HOP) * self.window
        matrix = self.fourier.to(self.spectral_dtype).sum(0)
        return spectrum(frames.to(self.spectral_dtype), matrix, _BINS).float()


class Parakeet(Conformer):
    """NeMo's FastConformer, as in Parakeet's CTC models and transducers: a frame every 80 ms.

    Features are normalised over an utterance's own frames, which removes its loudness, but amplifies rounding errors in
    nearly empty bands, such as those above 4 kHz of telephone speech. So that all formats have the same features there,
    levels are relative to their floor, and spectra are computed in fp64.
    """

    normalizes, front = True, ("subsampling",)
    spectral_dtype = torch.float64
    mel: Tensor
    subsampling: Any  # a class of transformers' that isn't public
    encode_positions: Any  # as well
    _PREEMPHASIS, _FLOOR, _EPSILON = 0.97, 2.0 ** -24, 1e-5

    def __init__(self, settings: Settings, options: EncoderOptions, config: Any):  # as in Network
        super().__init__(settings, options, config)
        self.register_buffer("mel", slaney_filters(_RATE, _BINS, config.num_mel_bins, 0.0, _RATE / 2),
                             persistent=False)
        self.scale: float = config.hidden_size ** 0.5 if config.scale_input else 1.0
        self.min_samples = 2 * _HOP  # one frame has no deviation

    def feature_frames(self, samples: N) -> N:
        return samples // _HOP

    def features(self, signals: Tensor, samples: Tensor) -> Tensor:
        before = functional.pad(signals, (1, 0))[:, :-1]
        signals = (signals - self._PREEMPHASIS * before).masked_fill(~lengths_to_mask(samples, signals.shape[1]), 0.0)
        count = self.feature_frames(samples)[:, None, None]
        frames = signals.shape[1] // _HOP
        power = self.power(functional.pad(signals, (_SIZE // 2, _SIZE // 2)))[:, :frames]
        # log(1 + energy), exact for small values too, which runtimes' own log1p is not.
        energy = product(power, self.mel) / self._FLOOR
        whole = 1 + energy
        level = torch.where(whole == 1, energy, whole.log() * (energy / (whole - 1)))
        inside = lengths_to_mask(count[:, 0, 0], frames)[..., None]
        feats, squares = centred(level, inside, count, 1)
        return (feats / ((squares / (count - 1)).sqrt() + self._EPSILON)).masked_fill(~inside, 0.0)

    def subsampled(self, feats: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        states = self.subsampling(feats, lengths_to_mask(counts, feats.shape[1])) * self.scale
        return states, self.encode_positions(states)


class Lasr(Conformer):
    """LASR's Conformer, as in MedASR: a frame every 40 ms."""

    front = ("subsampler",)
    mel: Tensor
    subsampler: Any  # a class of transformers' that isn't public
    rotary_emb: Any  # as well
    _LOW, _HIGH, _FLOOR = 125.0, 7500.0, 1e-5

    def __init__(self, settings: Settings, options: EncoderOptions, config: Any):  # as in Network
        super().__init__(settings, options, config)
        self.register_buffer("mel", kaldi_filters(_RATE, _BINS, config.num_mel_bins, self._LOW, self._HIGH,
                                                  torch.float64), persistent=False)
        frames = 1
        for conv in self.strided:
            frames = (frames - 1) * conv.stride[0] + conv.kernel_size[0]
        self.min_samples = _SIZE + (frames - 1) * _HOP

    def feature_frames(self, samples: N) -> N:
        return (samples - _SIZE) // _HOP + 1

    def features(self, signals: Tensor, samples: Tensor) -> Tensor:
        return product(self.power(signals), self.mel).clamp(min=self._FLOOR).log()

    def subsampled(self, feats: Tensor, counts: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        states = self.subsampler(feats)
        return states, self.rotary_emb(states, torch.arange(states.shape[1], device=states.device)[None])
