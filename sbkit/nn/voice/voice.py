"""The whole voice: text to durations, to codes, to waveforms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sbkit.nn.codec.decoder import CodecDecoder
from sbkit.nn.codec.quantiser import Quantiser
from sbkit.nn.codec.wave_head import WaveHead
from sbkit.nn.lengths import lengths_to_mask
from sbkit.nn.voice.code_head import CodeHead
from sbkit.nn.voice.durations import Durations, rounded
from sbkit.nn.voice.frame_decoder import FrameDecoder
from sbkit.nn.voice.text_encoder import TextEncoder


class Taught(NamedTuple):
    """What became of texts whose durations were told."""

    states: Tensor  # [B, T, D], of frames
    durations: Tensor  # [B, U + 2], predicted: logarithms of one more than a symbol's frames


class VoiceModel(nn.Module):
    """The parts of a voice, as one. What a text sounds like does not depend on its batch."""

    def __init__(self, encoder: TextEncoder, durations: Durations, frame_decoder: FrameDecoder, code_head: CodeHead,
                 quantiser: Quantiser, decoder: CodecDecoder, head: WaveHead):
        super().__init__()
        self.encoder, self.durations, self.frame_decoder, self.code_head = encoder, durations, frame_decoder, code_head
        self.quantiser, self.decoder, self.head = quantiser, decoder, head

    @property
    def stride(self) -> int:
        """Samples of a frame."""
        return self.head.hop * self.decoder.fold

    def teach(self, text: Tensor, lengths: Tensor, speaker: Tensor, frames: Tensor, width: int) -> Taught:
        """Ids of symbols [B, U], their numbers [B], speakers [B], and frames [B, U + 2] of the silence before, of each
        symbol and of the silence after, ``width`` at most, to what the codes are chosen by."""
        states = self.encoder(text, lengths, speaker)
        return Taught(self.frame_decoder(states, frames, width), self.durations(states, lengths + 2))

    def forward(self, text: Tensor, lengths: Tensor, speaker: Tensor, speed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids of symbols [B, U], their numbers [B], speakers [B] and speeds [B] to waveforms [B, S], their samples [B]
        and the frames of each symbol [B, U], silence before and after being the first's and the last's."""
        states = self.encoder(text, lengths, speaker)
        frames = rounded(self.durations(states, lengths + 2), lengths + 2, speed)
        total = frames.sum(1)
        width: int = total.max().item()  # type: ignore[assignment]  # of whole numbers
        torch._check(width >= 1)
        chosen, numbers = self.code_head.choose(self.frame_decoder(states, frames, width))
        codes = self.quantiser.joined(chosen)
        # Codes of what is no number would sound like any others: whoever calls this has to see what they are.
        vectors = self.quantiser.embed(codes).masked_fill(~numbers[..., None], torch.nan)
        sound = self.head(self.decoder(vectors, total), total * self.decoder.fold)
        return sound.clamp(-1.0, 1.0), total * self.stride, self._of_symbols(frames, lengths)

    @staticmethod
    def _of_symbols(frames: Tensor, lengths: Tensor) -> Tensor:
        """Add the silences [B, U + 2] to the first and the last symbol: [B, U]."""
        at = torch.arange(frames.shape[1] - 2, device=frames.device)
        after = frames.gather(1, lengths[:, None] + 1)
        inside = frames[:, 1:-1] * lengths_to_mask(lengths, at.shape[0])
        return inside + (at == 0) * frames[:, :1] + (at == lengths[:, None] - 1) * after
