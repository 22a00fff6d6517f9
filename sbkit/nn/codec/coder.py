"""The whole codec: waveforms to codes, and codes to waveforms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.codec.fourier import LogMel, WaveHead
from sbkit.nn.codec.quantiser import Quantised, Quantiser
from sbkit.nn.lengths import lengths_to_mask


class Block(nn.Module):
    """A depthwise convolution over time, then pointwise layers, with a residual connection.

    size : channels
    hidden : channels within the block
    kernel_size : of the convolution, an odd number
    scale : initial scale of the residual branch: small, so that a stack of blocks starts near the identity
    """

    def __init__(self, size: int, hidden: int, kernel_size: int = 7, scale: float = 1.0):
        super().__init__()
        self.depthwise = nn.Conv1d(size, size, kernel_size, padding=kernel_size // 2, groups=size)
        self.norm = nn.LayerNorm(size)
        self.wide, self.narrow = nn.Linear(size, hidden), nn.Linear(hidden, size)
        self.scale = nn.Parameter(torch.full((size,), scale))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """[B, T, C] and [B, T, 1], 1 for real frames and 0 for padding, to [B, T, C]."""
        y = self.depthwise((x * real).transpose(1, 2)).transpose(1, 2)
        y = self.narrow(functional.gelu(self.wide(self.norm(y))))
        return x + self.scale * y


class ConvNeXt(nn.Module):
    """A stack of ``Block``: [B, T, C] and [B, T, 1] (1: real, 0: padding) to [B, T, C]."""

    def __init__(self, size: int, hidden: int, layers: int, kernel_size: int = 7):
        super().__init__()
        self.blocks = nn.ModuleList([Block(size, hidden, kernel_size, 1 / max(1, layers)) for _ in range(layers)])

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, real)
        return x


class CodecEncoder(nn.Module):
    """Features [B, T * fold, F] and code frames [B] to vectors [B, T, D]; padding has no effect on them.

    input_size : F
    output_size : D, the quantiser's ``size``
    size, hidden, layers, kernel_size : of the ConvNeXt blocks
    fold : feature frames in a code frame
    """

    def __init__(self, input_size: int, output_size: int, size: int = 128, hidden: int = 384, layers: int = 4,
                 kernel_size: int = 7, fold: int = 2):
        super().__init__()
        self.fold, self.output_size = fold, output_size
        self.first, self.first_norm = nn.Linear(fold * input_size, size), nn.LayerNorm(size)
        self.blocks = ConvNeXt(size, hidden, layers, kernel_size)
        self.last_norm, self.last = nn.LayerNorm(size), nn.Linear(size, output_size)

    def forward(self, feats: Tensor, frames: Tensor) -> Tensor:
        folded = feats.unflatten(1, (-1, self.fold)).flatten(2)
        real = lengths_to_mask(frames, folded.shape[1])[..., None].to(folded.dtype)
        x = self.blocks(self.first_norm(self.first(folded)), real)
        return self.last(self.last_norm(x)) * real


class CodecDecoder(nn.Module):
    """Vectors [B, T, D] and code frames [B] to states [B, T * fold, C], 0 for padding.

    input_size : D
    size, hidden : of the ConvNeXt blocks
    slow_layers : blocks at the code frame rate
    fast_layers : blocks at the output frame rate
    fold : output frames in a code frame
    """

    def __init__(self, input_size: int, size: int = 128, hidden: int = 384, slow_layers: int = 4, fast_layers: int = 2,
                 kernel_size: int = 7, fold: int = 2):
        super().__init__()
        self.fold, self.size, self.input_size = fold, size, input_size
        self.first, self.first_norm = nn.Linear(input_size, size), nn.LayerNorm(size)
        self.slow = ConvNeXt(size, hidden, slow_layers, kernel_size)
        self.unfold = nn.Linear(size, fold * size)
        self.fast = ConvNeXt(size, hidden, fast_layers, kernel_size)
        self.last_norm = nn.LayerNorm(size)

    def forward(self, vectors: Tensor, frames: Tensor) -> Tensor:
        real = lengths_to_mask(frames, vectors.shape[1])[..., None].to(vectors.dtype)
        x = self.slow(self.first_norm(self.first(vectors)), real)
        x = self.unfold(x).unflatten(2, (self.fold, self.size)).flatten(1, 2)
        real = real.repeat_interleave(self.fold, dim=1)
        return self.last_norm(self.fast(x, real)) * real


class CodecOutput(NamedTuple):
    """The outputs of the codec for a batch of waveforms."""

    sound: Tensor  # [B, T * stride], 0 beyond an utterance's frames
    quantised: Quantised
    frames: Tensor  # [B] int64, code frames


def definition(part: nn.Module) -> dict[str, Any]:
    """Return what defines a part of a codec besides its weights: its class and its plain attributes."""
    return {"class": type(part).__name__} | {
        key: value for key, value in vars(part).items()
        if key != "training" and not key.startswith("_") and isinstance(value, (int, float, str, tuple))}


class Coder(nn.Module):
    """A complete codec. An utterance's codes and its sound do not depend on its batch."""

    def __init__(self, features: LogMel, encoder: CodecEncoder, quantiser: Quantiser, decoder: CodecDecoder,
                 head: WaveHead):
        super().__init__()
        self.features, self.encoder, self.quantiser = features, encoder, quantiser
        self.decoder, self.head = decoder, head

    @property
    def stride(self) -> int:
        """Samples in a code frame."""
        return self.features.stride

    @property
    def bit_rate(self) -> float:
        """Bits per second."""
        return self.quantiser.bits * self.features.frame_rate

    def definition(self) -> dict[str, dict[str, Any]]:
        """Return what defines the codec besides its weights: the class and the plain attributes of each part."""
        return {name: definition(part) for name, part in self.named_children()}

    def forward(self, signals: Tensor, samples: Tensor) -> CodecOutput:
        """Encode and decode waveforms [B, S] with sample counts [B]."""
        feats, frames = self.features(signals, samples)
        quantised = self.quantiser(self.encoder(feats, frames))
        return CodecOutput(self.sound(quantised.vectors, frames), quantised, frames)

    def encode(self, signals: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Waveforms [B, S] and sample counts [B] to codes [B, T, Q] and code frames [B]; codes of padding are 0."""
        return Encode(self.features, self.encoder, self.quantiser)(signals, samples)

    def decode(self, codes: Tensor, frames: Tensor) -> Tensor:
        """Codes [B, T, Q] and code frames [B] to waveforms [B, T * stride]."""
        return Decode(self.quantiser, self.decoder, self.head)(codes, frames)

    def sound(self, vectors: Tensor, frames: Tensor) -> Tensor:
        """Quantised vectors [B, T, D] and code frames [B] to waveforms [B, T * stride]."""
        return self.head(self.decoder(vectors, frames), frames * self.decoder.fold)


class Encode(nn.Module):
    """The parts of a codec that turn waveforms [B, S] and their lengths [B] into codes [B, T, Q] and code frames [B].

    Codes of padding are 0.
    """

    def __init__(self, features: LogMel, encoder: CodecEncoder, quantiser: Quantiser):
        super().__init__()
        self.features, self.encoder, self.quantiser = features, encoder, quantiser

    def forward(self, signals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        feats, frames = self.features(signals, lengths)
        codes = self.quantiser(self.encoder(feats, frames)).codes
        return codes * lengths_to_mask(frames, codes.shape[1])[..., None], frames


class Decode(nn.Module):
    """The parts of a codec that turn codes [B, T, Q] and code frames [B] into waveforms [B, T * stride]."""

    def __init__(self, quantiser: Quantiser, decoder: CodecDecoder, head: WaveHead):
        super().__init__()
        self.quantiser, self.decoder, self.head = quantiser, decoder, head

    def forward(self, codes: Tensor, frames: Tensor) -> Tensor:
        return self.head(self.decoder(self.quantiser.embed(codes), frames), frames * self.decoder.fold)
