"""Discriminators: networks that tell recordings from what the codec makes, at several resolutions of the spectrum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.codec import fourier
from sbkit.nn.lengths import lengths_to_mask

#: Strides of the layers in time and in frequency.
_STRIDES = ((1, 1), (1, 2), (2, 2), (2, 2))
_SLOPE = 0.1  # of negative values after each layer


class Judged(NamedTuple):
    """What one discriminator makes of waveforms."""

    scores: Tensor  # [B, N, F]: high for recordings
    states: list[Tensor]  # of each layer, [B, C, N, F]
    frames: list[Tensor]  # of each layer, [B]


class Discriminator(nn.Module):
    """Waveforms [B, S] and sample counts [B] to scores, from a spectrogram with frames of one size."""

    window: Tensor

    def __init__(self, size: int, channels: int):
        super().__init__()
        self.size, self.hop = size, size // 4
        self.register_buffer("window", fourier.window(size).float(), persistent=False)
        self.layers = nn.ModuleList([nn.Conv2d(channels if i else 2, channels, (3, 9), stride, (1, 4))
                                     for i, stride in enumerate(_STRIDES)])
        self.last = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, signals: Tensor, samples: Tensor) -> Judged:
        spectrum = torch.stft(signals, self.size, self.hop, window=self.window, center=True, pad_mode="constant",
                              return_complex=True)
        count, states, frames = samples // self.hop + 1, [], []
        x = _masked(torch.stack([spectrum.real, spectrum.imag], 1).transpose(2, 3), count)  # [B, 2, N, bins]
        for layer, (stride, _) in zip(self.layers, _STRIDES, strict=True):
            count = (count - 1) // stride + 1
            x = _masked(functional.leaky_relu(layer(x), _SLOPE), count)
            states.append(x)
            frames.append(count)
        return Judged(self.last(x).squeeze(1), states, frames)


class Discriminators(nn.Module):
    """Several discriminators, or none where a recipe's adversarial stage is off, so that no parameter is idle.

    adversarial_from : the step from which the codec is trained against them; 0: there are none
    sizes : samples of a frame of each
    channels : of their layers
    """

    def __init__(self, adversarial_from: int = 0, sizes: Sequence[int] = (256, 512, 1024), channels: int = 32):
        super().__init__()
        self.each = nn.ModuleList([Discriminator(size, channels) for size in sizes] if adversarial_from else [])

    def __len__(self) -> int:
        return len(self.each)

    def forward(self, signals: Tensor, samples: Tensor) -> list[Judged]:
        return [each(signals, samples) for each in self.each]

    def fooled(self, made: Tensor, wanted: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """How little what is made passes for a recording [B], and how far its states are from a recording's [B].

        The discriminators' own parameters get no gradients from it.
        """
        parameters = {name: each.detach() for name, each in self.named_parameters()}
        ours = torch.func.functional_call(self, parameters, (made, samples))
        with torch.no_grad():
            theirs = self(wanted, samples)
        score = sum((_mean(functional.relu(1 - one.scores), one.frames[-1]) for one in ours), made.new_zeros(len(made)))
        apart = made.new_zeros(len(made))
        for one, other in zip(ours, theirs, strict=True):
            for state, target, frames in zip(one.states, other.states, one.frames, strict=True):
                apart = apart + _mean((state - target).abs().mean(1), frames) / len(one.states)
        return score / len(self), apart / len(self)

    def mistaken(self, made: Tensor, wanted: Tensor, samples: Tensor) -> Tensor:
        """How badly they tell what is made from recordings: [B]. Only their own parameters get gradients from it."""
        wrong = made.new_zeros(len(made))
        for one, other in zip(self(made.detach(), samples), self(wanted, samples), strict=True):
            wrong = wrong + _mean(functional.relu(1 + one.scores) + functional.relu(1 - other.scores), one.frames[-1])
        return wrong / len(self)

    def idle(self) -> Tensor:
        """Return a zero of which all parameters are a part, for steps in which they aren't trained."""
        return 0.0 * torch.stack([each.sum() for each in self.parameters()]).sum()


def _masked(states: Tensor, frames: Tensor) -> Tensor:
    """Set what lies beyond the frames of [B, C, N, F] to 0."""
    return states * lengths_to_mask(frames, states.shape[2])[:, None, :, None]


def _mean(values: Tensor, frames: Tensor) -> Tensor:
    """The mean of [B, N, F] over the frames that exist: [B]."""
    real = lengths_to_mask(frames, values.shape[1])
    return (values.mean(2) * real).sum(1) / frames
