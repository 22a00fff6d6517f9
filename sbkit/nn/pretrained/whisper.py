"""Whisper's encoder: convolutions and a transformer over log-mel features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.nn.kaldi import fourier, framed, full_precision, product, slaney_filters, spectrum
from sbkit.nn.lengths import N, lengths_to_mask
from sbkit.nn.pretrained.networks import EncoderOptions, Network, at_least, lowest, make, padded
from sbkit.nn.pretrained.source import Settings

_RATE = 16_000
_STRIDE = 2  # of the second convolution
_MIN_SAMPLES = 201  # smallest number of samples that features can be computed from
_RIGHT_CONTEXT = 2  # frames after an utterance that the convolutions see


class Whisper(Network):
    """Whisper's encoder: waveforms [B, S] and sample counts [B] to states [B, T, D], a frame every 20 ms.

    It was pretrained on windows of 30 seconds, with attention to the silence after an utterance. Here inputs are as
    long as the longest utterance of a batch, and attention ignores the frames after each utterance, so that its states
    do not depend on its batch. This is several times faster for clips of 5 seconds, but the encoder needs the first
    steps of training to adapt. With ``whole_window`` inputs are padded to 30 seconds as in pretraining. Raises for
    utterances of more than 30 seconds.
    """

    auto, inside = "AutoModelForAudioClassification", "encoder."  # the auto class of a model without a decoder
    prefixes, front = ("model.encoder.", "encoder."), ("conv1", "conv2")
    reinitialised = ()

    def __init__(self, settings: Settings, options: EncoderOptions, config: Any):  # as in Network
        masking = settings.config if config.apply_spec_augment else {}
        super().__init__(Settings(settings.source, masking, {}), options, config)
        encoder = make(self.auto, config).encoder
        self.features = WhisperLogMel(config.num_mel_bins)
        self.conv1, self.conv2, self.embed_positions = encoder.conv1, encoder.conv2, encoder.embed_positions
        self.layers, self.layer_norm = lowest(encoder.layers, options.layers), encoder.layer_norm
        self.dropout: float = config.dropout
        self.max_frames: int = config.max_source_positions
        self.longest_seconds = self.max_frames * _STRIDE * HOP / _RATE
        self.whole_window = options.whole_window

    def frames(self, samples: N) -> N:
        return (self.features.frames(at_least(samples, 1)) + _STRIDE - 1) // _STRIDE

    def forward(self, signals: Tensor, samples: Tensor) -> Tensor:
        """[B, S], [B] -> [B, T, D]."""
        if self.frames(signals.shape[1]) > self.max_frames:  # beyond the window there may only be padding
            limit = self.max_frames * _STRIDE * HOP
            longest_samples = int(samples.max())  # syncs with the host
            if longest_samples > limit:
                raise SbkitError("clip-too-long", f"Whisper's encoder takes at most {self.longest_seconds:g} s, but an "
                                 f"utterance has {longest_samples / _RATE:g} s", key="corpus.max_duration",
                                 hint="leave out longer ones with corpus.max_duration")
            signals = signals[:, :limit]
        longest = self.frames(signals.shape[1])
        if self.whole_window:
            feats = self.features(padded(signals, self.max_frames * _STRIDE * HOP))
        else:
            feats = self.features(padded(signals, _MIN_SAMPLES), more=_RIGHT_CONTEXT)
        feats = self.masked(feats, self.features.frames(samples))
        with self.front_context():
            states = functional.gelu(self.conv1(feats.transpose(1, 2)))
            states = functional.gelu(self.conv2(states)).transpose(1, 2)
        inside = None
        if not self.whole_window:
            states = states[:, :longest]
            inside = lengths_to_mask(self.frames(samples), states.shape[1])[:, None, None]
        states = states + self.embed_positions.weight[:states.shape[1]]
        states = functional.dropout(states, self.dropout, self.training)
        for layer in self.layers:
            states = layer(states, attention_mask=inside)
        return self.layer_norm(states[:, :longest])


HOP = 160
_SIZE = 400
_FLOOR, _RANGE = 1e-10, 8.0  # smallest energy; range of its logarithm below the maximum


class WhisperLogMel(nn.Module):
    """Waveforms [B, S] to features [B, T, F], a frame every 160 samples.

    A waveform is padded with silence, as in Whisper's windows of 30 seconds, so an utterance's features are the same in
    a batch.

    n_mels : number of bands
    """

    window: Tensor
    fourier: Tensor
    mel: Tensor

    def __init__(self, n_mels: int = 80):
        super().__init__()
        self.register_buffer("window", torch.hann_window(_SIZE, dtype=torch.float64).float(), persistent=False)
        self.register_buffer("fourier", fourier(_SIZE, _SIZE), persistent=False)
        self.register_buffer("mel", slaney_filters(_RATE, _SIZE, n_mels, 0.0, _RATE / 2), persistent=False)

    @staticmethod
    def frames(samples: N) -> N:
        """Return the number of frames for a number of samples."""
        return (samples + HOP - 1) // HOP

    def forward(self, signals: Tensor, more: int = 0) -> Tensor:
        """[B, S] with S of at least 201 -> [B, T + more, F]; ``more`` frames of silence follow."""
        with full_precision(signals):
            signals = signals.float()
            half = _SIZE // 2
            after = (self.frames(signals.shape[1]) + more - 1) * HOP + half - signals.shape[1]
            before = signals[:, 1:half + 1].flip(1)
            whole = torch.cat([before, functional.pad(signals, (0, after))], dim=1)
            power = spectrum(framed(whole, _SIZE, HOP) * self.window, self.fourier, _SIZE)
            level = product(power, self.mel).clamp(min=_FLOOR).log10()
            loudest = level.amax(dim=(1, 2), keepdim=True)
            return (torch.maximum(level, loudest - _RANGE) + 4.0) / 4.0
