"""Waveforms to waveforms with less noise, by masks over frames: whole, and piece by piece with the same samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.enhance.transform import Frames
from sbkit.nn.kaldi import full_precision
from sbkit.nn.lengths import lengths_to_mask


class CausalBlock(nn.Module):
    """A depthwise convolution over a frame and those before it, then a layer of each frame by itself, added to the
    input.

    size : channels
    hidden : channels within the block
    kernel_size : frames that the convolution sees
    dilation : frames from one that it sees to the next
    scale : of what is added in the beginning
    """

    def __init__(self, size: int, hidden: int, kernel_size: int, dilation: int, scale: float):
        super().__init__()
        self.depthwise = nn.Conv1d(size, size, kernel_size, dilation=dilation, groups=size)
        self.norm = nn.LayerNorm(size)
        self.wide, self.narrow = nn.Linear(size, hidden), nn.Linear(hidden, size)
        self.scale = nn.Parameter(torch.full((size,), scale))
        self.before = (kernel_size - 1) * dilation
        """Frames before the first that it sees."""

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, C] and the frames before [B, N, C] to [B, T, C] and the frames before the next."""
        seen = torch.cat([before, x], dim=1)
        y = self.depthwise(seen.transpose(1, 2)).transpose(1, 2)
        y = self.narrow(functional.gelu(self.wide(self.norm(y))))
        return x + self.scale * y, seen[:, seen.shape[1] - self.before:]


class CausalConvolutions(nn.Module):
    """Features [B, T, F] to masks [B, T, M], by blocks whose dilations are 1, 2, 4, ..., again and again.

    transform : has the sizes of features and masks, F and M; it is no part of the network
    size, hidden, layers, kernel_size : of the blocks
    cycle : layers after which the dilation is 1 again
    """

    def __init__(self, transform: Frames, size: int = 128, hidden: int = 256, layers: int = 6, kernel_size: int = 3,
                 cycle: int = 6):
        super().__init__()
        self._shapes = [((kernel_size - 1) * 2 ** (i % cycle), size) for i in range(layers)]
        self.first, self.first_norm = nn.Linear(transform.features_size, size), nn.LayerNorm(size)
        self.blocks = nn.ModuleList([CausalBlock(size, hidden, kernel_size, 2 ** (i % cycle), 1 / layers)
                                     for i in range(layers)])
        self.last_norm, self.last = nn.LayerNorm(size), nn.Linear(size, transform.masks_size)

    def state(self, batch: int) -> tuple[Tensor, ...]:
        """Make the state before the first frame, zeros: the frames [B, N, C] before those of each block."""
        weight = self.first.weight
        return tuple(weight.new_zeros(batch, *shape) for shape in self._shapes)

    def forward(self, features: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute masks of frames that follow those before, and the next state."""
        x, after = self.first_norm(self.first(features)), []
        for block, before in zip(self.blocks, state, strict=True):
            x, left = block(x, before)
            after.append(left)
        return self.last(self.last_norm(x)), tuple(after)


_LEAST = 1e-8


def snr(estimates: Tensor, targets: Tensor, lengths: Tensor, most: float | None = None) -> Tensor:
    """Compute the signal-to-noise ratio [B] of waveforms [B, S] against targets [B, S], of which ``lengths`` [B] count.

    most : decibels that a perfect estimate is given; None: no limit
    """
    inside = lengths_to_mask(lengths, targets.shape[1])
    wanted = (targets * inside).float()
    return _ratio(wanted, (estimates * inside).float() - wanted, most)


def si_snr(estimates: Tensor, targets: Tensor, lengths: Tensor, most: float | None = None) -> Tensor:
    """Compute the scale-invariant signal-to-noise ratio [B]: of the estimate's projection on the target, both without
    their mean, against what the estimate has besides.

    most : as for :func:`snr`
    """
    inside = lengths_to_mask(lengths, targets.shape[1])

    def centred(signals: Tensor) -> Tensor:
        signals = (signals * inside).float()
        return (signals - signals.sum(1, keepdim=True) / lengths[:, None]) * inside

    estimate, target = centred(estimates), centred(targets)
    scale = (estimate * target).sum(1, keepdim=True) / (target.square().sum(1, keepdim=True) + _LEAST)
    wanted = scale * target
    return _ratio(wanted, estimate - wanted, most)


def _ratio(wanted: Tensor, error: Tensor, most: float | None) -> Tensor:
    signal, noise = wanted.square().sum(1) + _LEAST, error.square().sum(1) + _LEAST
    if most is not None:
        noise = noise + 10 ** (-most / 10) * signal
    return 10 * torch.log10(signal / noise)


State = tuple[Tensor, ...]


class Enhancer(nn.Module):
    """Waveforms [B, S] and sample counts [B] to waveforms [B, S], 0 beyond an utterance's end.

    A frame's mask depends on it, on those before it and on ``ahead`` behind it, so what is heard can be given out
    ``delay`` samples later, and an utterance has the same samples alone, in a batch, and in pieces of any size.

    transform : waveforms to coefficients of frames and back, such as ``FourierFrames``
    mask_network : features of frames to masks, ``CausalConvolutions`` or what has its ``forward`` and ``state``
    ahead : frames that the network sees before it gives the mask of one
    """

    def __init__(self, transform: Frames, mask_network: CausalConvolutions, ahead: int = 0):
        super().__init__()
        if ahead < 0:
            raise ValueError(f"ahead is {ahead}, and must be 0 or more")
        self.transform, self.mask_network, self.ahead = transform, mask_network, ahead
        self.hop, self.delay = transform.hop, transform.overlap + ahead * transform.hop

    def forward(self, signals: Tensor, lengths: Tensor) -> Tensor:
        size = signals.shape[1]
        inside = lengths_to_mask(lengths, size)
        frames = (size + self.hop - 1) // self.hop + self.delay // self.hop
        padded = functional.pad(signals.masked_fill(~inside, 0.0), (0, self.hop + self.delay))[:, : frames * self.hop]
        sound, *_ = self.step(padded, self.state(padded.shape[0]))
        return sound[:, self.delay : self.delay + size].masked_fill(~inside, 0.0)

    def state(self, batch: int) -> State:
        """Make the state before the first sample, zeros: the samples before and what frames add to those that follow,
        [B, size - hop] each, the frames that wait for their masks, and the network's."""
        made, transform = self.transform.analysis.new_zeros, self.transform
        waiting = [made(batch, self.ahead, transform.analysis.shape[1])] if self.ahead else []
        return made(batch, transform.overlap), made(batch, transform.overlap), *waiting, *self.mask_network.state(batch)

    def step(self, samples: Tensor, state: State) -> tuple[Tensor, ...]:
        """Enhance the next samples [B, T * hop] of streams: returns [B, T * hop], ``delay`` samples later, and the next
        state."""
        before, added, *rest = state
        waiting, network = rest[: int(self.ahead > 0)], tuple(rest[int(self.ahead > 0) :])
        heard = torch.cat([before, samples], dim=1)
        with full_precision(samples):
            coefficients = self.transform.analyse(heard)
            features = self.transform.features(coefficients)
        masks, network = self.mask_network(features, network)
        coefficients = torch.cat([*waiting, coefficients], dim=1)
        waiting = [coefficients[:, masks.shape[1] :]] if self.ahead else []
        coefficients = coefficients[:, : masks.shape[1]]
        with full_precision(samples):
            sound = self.transform.synthesise(self.transform.masked(coefficients, masks.float()))
        sound = sound + functional.pad(added, (0, samples.shape[1]))
        count = samples.shape[1]
        return sound[:, :count], heard[:, count:], sound[:, count:], *waiting, *network
