"""Discriminators: networks that tell recordings from the codec's output, at several resolutions of the spectrum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.codec import fourier
from sbkit.nn.lengths import frame_mean, lengths_to_mask

#: Strides of the layers in time and in frequency.
_STRIDES = ((1, 1), (1, 2), (2, 2), (2, 2))
_SLOPE = 0.1  # of negative values after each layer


class DiscriminatorOutput(NamedTuple):
    """The output of one discriminator."""

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

    def forward(self, signals: Tensor, samples: Tensor) -> DiscriminatorOutput:
        spectrum = torch.stft(signals, self.size, self.hop, window=self.window, center=True, pad_mode="constant",
                              return_complex=True)
        count = samples // self.hop + 1
        states = []
        frames = []
        x = _masked(torch.stack([spectrum.real, spectrum.imag], 1).transpose(2, 3), count)  # [B, 2, N, bins]
        for layer, (stride, _) in zip(self.layers, _STRIDES, strict=True):
            count = (count - 1) // stride + 1
            x = _masked(functional.leaky_relu(layer(x), _SLOPE), count)
            states.append(x)
            frames.append(count)
        return DiscriminatorOutput(self.last(x).squeeze(1), states, frames)


class Discriminators(nn.Module):
    """Several discriminators, or none without adversarial training, so that no parameter is unused.

    adversarial_from : the step from which the codec is trained against them; 0: there are none
    sizes : samples of a frame of each
    channels : of their layers
    """

    def __init__(self, adversarial_from: int = 0, sizes: Sequence[int] = (256, 512, 1024), channels: int = 32):
        super().__init__()
        self.each = nn.ModuleList([Discriminator(size, channels) for size in sizes] if adversarial_from else [])

    def __len__(self) -> int:
        return len(self.each)

    def forward(self, signals: Tensor, samples: Tensor) -> list[DiscriminatorOutput]:
        return [discriminator(signals, samples) for discriminator in self.each]

    def generator_losses(self, decoded: Tensor, recording: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the codec's adversarial loss [B] and its feature matching loss [B], from waveforms [B, S].

        The discriminators' own parameters get no gradients from it.
        """
        parameters = {name: parameter.detach() for name, parameter in self.named_parameters()}
        of_decoded = torch.func.functional_call(self, parameters, (decoded, samples))
        with torch.no_grad():
            of_recording = self(recording, samples)
        zeros = decoded.new_zeros(len(decoded))
        loss = sum((frame_mean(functional.relu(1 - output.scores), output.frames[-1]) for output in of_decoded), zeros)
        distance = zeros
        for output, target_output in zip(of_decoded, of_recording, strict=True):
            for state, target, frames in zip(output.states, target_output.states, output.frames, strict=True):
                distance = distance + frame_mean((state - target).abs().mean(1), frames) / len(output.states)
        return loss / len(self), distance / len(self)

    def discriminator_loss(self, decoded: Tensor, recording: Tensor, samples: Tensor) -> Tensor:
        """Compute the discriminators' own loss [B], with gradients for their parameters only."""
        loss = decoded.new_zeros(len(decoded))
        of_decoded = self(decoded.detach(), samples)
        of_recording = self(recording, samples)
        for fake, real in zip(of_decoded, of_recording, strict=True):
            errors = functional.relu(1 + fake.scores) + functional.relu(1 - real.scores)
            loss = loss + frame_mean(errors, fake.frames[-1])
        return loss / len(self)

    def idle(self) -> Tensor:
        """Return a zero that depends on all parameters, for steps in which they aren't trained."""
        return 0.0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()


def _masked(states: Tensor, frames: Tensor) -> Tensor:
    """Set the padding of [B, C, N, F] to 0."""
    return states * lengths_to_mask(frames, states.shape[2])[:, None, :, None]
