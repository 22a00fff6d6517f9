"""A voice: text to durations, to codes, to waveforms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.codec.coder import CodecDecoder, ConvNeXt
from sbkit.nn.codec.fourier import WaveHead
from sbkit.nn.codec.quantiser import Quantiser
from sbkit.nn.lengths import lengths_to_mask

#: The largest logarithm of a symbol's frames: a symbol of seconds is a mistake, and must not fill the memory.
MAX_LOG_FRAMES = 5.5


class Durations(nn.Module):
    """States of symbols [B, U, C] and their numbers [B] to the logarithms of one more than their frames [B, U].

    input_size : C
    size, hidden : of the ConvNeXt blocks
    layers : blocks
    """

    def __init__(self, input_size: int, size: int = 128, hidden: int = 256, layers: int = 2, kernel_size: int = 5):
        super().__init__()
        self.input_size = input_size
        self.first, self.norm = nn.Linear(input_size, size), nn.LayerNorm(size)
        self.blocks = ConvNeXt(size, hidden, layers, kernel_size)
        self.last = nn.Linear(size, 1)

    def forward(self, states: Tensor, lengths: Tensor) -> Tensor:
        real = lengths_to_mask(lengths, states.shape[1])[..., None].to(states.dtype)
        return self.last(self.norm(self.blocks(self.first(states), real)))[..., 0].float()


def duration_loss(predicted: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """Compute the squared error of the logarithms, a sum over the symbols of each utterance [B]."""
    errors = predicted - (frames + 1).float().log()
    return (errors.square() * lengths_to_mask(lengths, frames.shape[1])).sum(1)


def rounded(predicted: Tensor, lengths: Tensor, speed: Tensor) -> Tensor:
    """Round the ends of symbols by predicted durations at speeds [B], which keeps the total duration right; returns
    frames [B, U], at least one per utterance."""
    exact = (predicted.clamp(0.0, MAX_LOG_FRAMES).exp() - 1) / speed[:, None]
    ends = (exact * lengths_to_mask(lengths, predicted.shape[1])).cumsum(1).round().long()
    ends = torch.where(torch.arange(ends.shape[1], device=ends.device) >= lengths[:, None] - 1, ends.clamp(min=1), ends)
    return ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))


def spread(states: Tensor, frames: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Repeat each symbol's state over its frames, [B, width, C], with each frame's place in its symbol [B, width, 3].

    A place is the shares of the symbol before and after it, and the logarithm of the symbol's frames. Frames after the
    last symbol have arbitrary values.
    """
    ends = frames.cumsum(1)
    at = torch.arange(width, device=frames.device).expand(frames.shape[0], -1)
    symbol = (ends[:, None] <= at[..., None]).sum(2).clamp(max=frames.shape[1] - 1)
    size = frames.gather(1, symbol).clamp(min=1).float()
    before = (at - (ends - frames).gather(1, symbol)).float() + 0.5
    place = torch.stack([before / size, 1 - before / size, size.log()], dim=2)
    return states.gather(1, symbol[..., None].expand(-1, -1, states.shape[2])), place


#: In symbols: over which distances the nearness to the first and last symbol decays.
FADES = (1.0, 4.0, 16.0)


class TextEncoder(nn.Module):
    """Ids of symbols [B, U], their numbers [B] and speakers [B] to states [B, U + 2, C], 0 for padding: those of the
    silence before, of the symbols, and of the silence after. Silence has the last row of the table.

    A sentence's melody depends on where it begins and ends, which may be further away than convolutions see, so each
    state has an embedding of its distance to both.

    symbols : rows of the table, with padding's, which is row 0
    size, hidden : of the ConvNeXt blocks
    layers : blocks
    speakers : voices to choose from
    """

    def __init__(self, symbols: int, size: int = 192, hidden: int = 576, layers: int = 6, kernel_size: int = 7,
                 speakers: int = 1):
        super().__init__()
        if symbols < 2 or speakers < 1:
            raise ValueError(f"symbols is {symbols} and speakers {speakers}: there must be a symbol besides padding, "
                             "and a speaker")
        self.symbols, self.size, self.speakers = symbols, size, speakers
        self.table, self.speaker = nn.Embedding(symbols + 1, size), nn.Embedding(speakers, size)
        self.place = nn.Linear(2 * len(FADES), size)
        self.blocks = ConvNeXt(size, hidden, layers, kernel_size)
        self.norm = nn.LayerNorm(size)

    def forward(self, text: Tensor, lengths: Tensor, speaker: Tensor) -> Tensor:
        width = text.shape[1] + 2
        at = torch.arange(width, device=text.device)
        silent = (at == 0) | (at == lengths[:, None] + 1)
        text = torch.where(silent, self.symbols, functional.pad(text, (1, 1)))
        real = lengths_to_mask(lengths + 2, width)[..., None].to(self.table.weight.dtype)
        # How near each place is to the beginning and to the end, on several scales: [B, width, 2 * len(FADES)].
        before, after = at.expand(lengths.shape[0], -1), ((lengths + 2)[:, None] - 1 - at).clamp(min=0)
        near = torch.stack([(-side / fade).exp() for side in (before, after) for fade in FADES], dim=2)
        x = self.table(text) + self.speaker(speaker)[:, None] + self.place(near)
        return self.norm(self.blocks(x, real)) * real


class FrameDecoder(nn.Module):
    """States of symbols [B, U, C], frames of each [B, U] and a width to states of frames [B, width, D].

    input_size : C
    size, hidden : of the ConvNeXt blocks
    layers : blocks
    """

    def __init__(self, input_size: int, size: int = 256, hidden: int = 768, layers: int = 6, kernel_size: int = 7):
        super().__init__()
        self.input_size, self.size = input_size, size
        self.first, self.place, self.first_norm = nn.Linear(input_size, size), nn.Linear(3, size), nn.LayerNorm(size)
        self.blocks = ConvNeXt(size, hidden, layers, kernel_size)
        self.norm = nn.LayerNorm(size)

    def forward(self, states: Tensor, frames: Tensor, width: int) -> Tensor:
        real = lengths_to_mask(frames.sum(1), width)[..., None].to(states.dtype)
        spoken, place = spread(self.first(states), frames, width)
        x = self.first_norm(spoken + self.place(place.to(states.dtype)))
        return self.norm(self.blocks(x, real))


class CodeHead(nn.Module):
    """States of frames [B, T, C] to a choice for each slot of a frame.

    A slot is an independent choice of a quantiser: an entry of a book, or a level of a number. There are as many logits
    as the widest slot has choices; those beyond a slot's own are masked, so that no invalid id is chosen.

    input_size : C
    quantiser : of the codec
    """

    exists: Tensor

    def __init__(self, input_size: int, quantiser: Quantiser):
        super().__init__()
        self.input_size, self.choices = input_size, quantiser.choices
        self.linear = nn.Linear(input_size, len(self.choices) * max(self.choices))
        exists = torch.arange(max(self.choices)) < torch.tensor(self.choices)[:, None]
        self.register_buffer("exists", exists, persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        """Return logits [B, T, slots, choices], -inf for choices that a slot doesn't have."""
        logits = self.linear(states).float().unflatten(2, self.exists.shape)
        return logits.masked_fill(~self.exists, -torch.inf)

    def loss(self, states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross entropy of each frame [B, T], a sum over slots, and the share of right choices [B, T].

        chosen : [B, T, slots]
        """
        logits = self(states)
        losses = functional.cross_entropy(logits.flatten(0, 2), chosen.flatten(), reduction="none").view(chosen.shape)
        return losses.sum(2), (logits.argmax(3) == chosen).float().mean(2)

    def choose(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest choices [B, T, slots], and whether each frame's logits are finite [B, T]: if not, its
        choices are meaningless."""
        logits = self(states)
        return logits.argmax(3), logits.masked_fill(~self.exists, 0.0).sum((2, 3)).isfinite()


def longest(total: Tensor) -> int:
    """Return the largest of numbers of frames [B]; syncs with the host."""
    width: int = total.max().item()  # type: ignore[assignment]  # of whole numbers
    torch._check(width >= 1)
    return width


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

    def teacher_forced(self, text: Tensor, lengths: Tensor, speaker: Tensor, frames: Tensor,
                       width: int) -> tuple[Tensor, Tensor]:
        """Ids of symbols [B, U], their numbers [B], speakers [B], and frames [B, U + 2] of the silence before, of each
        symbol and of the silence after, ``width`` at most, to the states of frames [B, T, D], and to the predicted
        durations [B, U + 2]: logarithms of one more than a symbol's frames."""
        states = self.encoder(text, lengths, speaker)
        return self.frame_decoder(states, frames, width), self.durations(states, lengths + 2)

    def forward(self, text: Tensor, lengths: Tensor, speaker: Tensor, speed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids of symbols [B, U], their numbers [B], speakers [B] and speeds [B] to waveforms [B, S], their samples [B]
        and the frames of each symbol [B, U]; the first and the last include the silence before and after."""
        states = self.encoder(text, lengths, speaker)
        frames = rounded(self.durations(states, lengths + 2), lengths + 2, speed)
        total = frames.sum(1)
        chosen, finite = self.code_head.choose(self.frame_decoder(states, frames, longest(total)))
        codes = self.quantiser.joined(chosen)
        # NaN in the sound tells the caller; codes from logits that aren't finite would sound like any others.
        vectors = self.quantiser.embed(codes).masked_fill(~finite[..., None], torch.nan)
        sound = self.head(self.decoder(vectors, total), total * self.decoder.fold)
        at = torch.arange(frames.shape[1] - 2, device=frames.device)
        after = frames.gather(1, lengths[:, None] + 1)
        inside = frames[:, 1:-1] * lengths_to_mask(lengths, at.shape[0])
        of_symbols = inside + (at == 0) * frames[:, :1] + (at == lengths[:, None] - 1) * after
        return sound.clamp(-1.0, 1.0), total * self.stride, of_symbols
