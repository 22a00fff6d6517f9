"""The whole codec: waveforms to codes, and codes to waveforms."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from sbkit.nn.codec.convnext import CodecDecoder, CodecEncoder
from sbkit.nn.codec.fourier import LogMel, WaveHead
from sbkit.nn.codec.quantiser import Quantised, Quantiser
from sbkit.nn.lengths import lengths_to_mask


class Resynthesis(NamedTuple):
    """What became of a batch of waveforms."""

    sound: Tensor  # [B, T * stride], 0 beyond an utterance's frames
    quantised: Quantised
    frames: Tensor  # [B] int64, code frames


def definition(part: nn.Module) -> dict[str, Any]:
    """Return what defines a part of a codec besides its weights: its class, and the numbers that it has."""
    return {"class": type(part).__name__} | {
        key: value for key, value in vars(part).items()
        if key != "training" and not key.startswith("_") and isinstance(value, (int, float, str, tuple))}


class Coder(nn.Module):
    """The parts of a codec, as one. An utterance's codes and its sound do not depend on its batch."""

    def __init__(self, features: LogMel, encoder: CodecEncoder, quantiser: Quantiser, decoder: CodecDecoder,
                 head: WaveHead):
        super().__init__()
        self.features, self.encoder, self.quantiser = features, encoder, quantiser
        self.decoder, self.head = decoder, head

    @property
    def stride(self) -> int:
        """Samples of a code frame."""
        return self.features.stride

    @property
    def bit_rate(self) -> float:
        """Bits of a second."""
        return self.quantiser.bits * self.features.frame_rate

    def definition(self) -> dict[str, dict[str, Any]]:
        """Return what defines the codec besides its weights: the class of each part, and the numbers that it has."""
        return {name: definition(part) for name, part in self.named_children()}

    def forward(self, signals: Tensor, samples: Tensor) -> Resynthesis:
        """Waveforms [B, S] and sample counts [B] to what the codec makes of them."""
        feats, frames = self.features(signals, samples)
        quantised = self.quantiser(self.encoder(feats, frames))
        return Resynthesis(self.sound(quantised.vectors, frames), quantised, frames)

    def encode(self, signals: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Waveforms [B, S] and sample counts [B] to codes [B, T, Q] and code frames [B]; codes of padding are 0."""
        return Encode(self.features, self.encoder, self.quantiser)(signals, samples)

    def decode(self, codes: Tensor, frames: Tensor) -> Tensor:
        """Codes [B, T, Q] and code frames [B] to waveforms [B, T * stride]."""
        return Decode(self.quantiser, self.decoder, self.head)(codes, frames)

    def sound(self, vectors: Tensor, frames: Tensor) -> Tensor:
        """Quantised vectors [B, T, D] and code frames [B] to waveforms [B, T * stride]."""
        return _sound(self.decoder, self.head, vectors, frames)


class Encode(nn.Module):
    """The parts of a codec that turn waveforms [B, S] and their lengths [B] into codes [B, T, Q] and code frames [B].

    Codes of padding are 0.
    """

    def __init__(self, features: LogMel, encoder: CodecEncoder, quantiser: Quantiser):
        super().__init__()
        self.features, self.encoder, self.quantiser = features, encoder, quantiser

    def forward(self, signals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        feats, frames = self.features(signals, lengths)
        codes = self.quantiser.quantise(self.encoder(feats, frames))[1]
        return codes * lengths_to_mask(frames, codes.shape[1])[..., None], frames


class Decode(nn.Module):
    """The parts of a codec that turn codes [B, T, Q] and code frames [B] into waveforms [B, T * stride]."""

    def __init__(self, quantiser: Quantiser, decoder: CodecDecoder, head: WaveHead):
        super().__init__()
        self.quantiser, self.decoder, self.head = quantiser, decoder, head

    def forward(self, codes: Tensor, frames: Tensor) -> Tensor:
        return _sound(self.decoder, self.head, self.quantiser.embed(codes), frames)


def _sound(decoder: CodecDecoder, head: WaveHead, vectors: Tensor, frames: Tensor) -> Tensor:
    return head(decoder(vectors, frames), frames * decoder.fold)
