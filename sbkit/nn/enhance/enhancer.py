"""Removes noise from waveforms by masks over frames, with the same results on whole recordings and on streams."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.enhance.transform import Frames
from sbkit.nn.kaldi import full_precision
from sbkit.nn.lengths import lengths_to_mask


class CausalBlock(nn.Module):
    """A causal depthwise convolution over frames, then pointwise layers, with a residual connection.

    size : channels
    hidden : channels within the block
    kernel_size, dilation : of the convolution
    scale : initial scale of the residual branch
    """

    def __init__(self, size: int, hidden: int, kernel_size: int, dilation: int, scale: float):
        super().__init__()
        self.depthwise = nn.Conv1d(size, size, kernel_size, dilation=dilation, groups=size)
        self.norm = nn.LayerNorm(size)
        self.wide, self.narrow = nn.Linear(size, hidden), nn.Linear(hidden, size)
        self.scale = nn.Parameter(torch.full((size,), scale))
        self.before = (kernel_size - 1) * dilation
        """Left context in frames."""

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, C] and the frames before [B, N, C] to [B, T, C] and the frames before the next."""
        seen = torch.cat([before, x], dim=1)
        y = self.depthwise(seen.transpose(1, 2)).transpose(1, 2)
        y = self.narrow(functional.gelu(self.wide(self.norm(y))))
        return x + self.scale * y, seen[:, seen.shape[1] - self.before:]


class CausalConvolutions(nn.Module):
    """Features [B, T, F] to masks [B, T, M], by blocks whose dilations are 1, 2, 4, ... in cycles.

    transform : has the sizes of features and masks, F and M; it is not part of the network
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
        """Make the initial state, zeros: the frames [B, N, C] of left context of each block."""
        weight = self.first.weight
        return tuple(weight.new_zeros(batch, *shape) for shape in self._shapes)

    def forward(self, features: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the masks of the next frames of a stream, and the next state."""
        x = self.first_norm(self.first(features))
        next_state = []
        for block, before in zip(self.blocks, state, strict=True):
            x, left = block(x, before)
            next_state.append(left)
        return self.last(self.last_norm(x)), tuple(next_state)


_EPSILON = 1e-8


def snr(estimates: Tensor, targets: Tensor, lengths: Tensor, max_decibels: float | None = None) -> Tensor:
    """Compute the signal-to-noise ratio [B] of waveforms [B, S] against targets [B, S], of ``lengths`` [B] samples.

    max_decibels : the value for a perfect estimate; None: no limit
    """
    inside = lengths_to_mask(lengths, targets.shape[1])
    target = (targets * inside).float()
    return _ratio(target, (estimates * inside).float() - target, max_decibels)


def si_snr(estimates: Tensor, targets: Tensor, lengths: Tensor, max_decibels: float | None = None) -> Tensor:
    """Compute the scale-invariant signal-to-noise ratio [B]: of the estimate's projection on the target, both without
    their mean, against the rest of the estimate.

    max_decibels : as for :func:`snr`
    """
    inside = lengths_to_mask(lengths, targets.shape[1])

    def without_mean(signals: Tensor) -> Tensor:
        return (signals - signals.sum(1, keepdim=True) / lengths[:, None]) * inside

    estimate = without_mean((estimates * inside).float())
    target = without_mean((targets * inside).float())
    scale = (estimate * target).sum(1, keepdim=True) / (target.square().sum(1, keepdim=True) + _EPSILON)
    projection = scale * target
    return _ratio(projection, estimate - projection, max_decibels)


def _ratio(target: Tensor, error: Tensor, max_decibels: float | None) -> Tensor:
    signal, noise = target.square().sum(1) + _EPSILON, error.square().sum(1) + _EPSILON
    if max_decibels is not None:
        noise = noise + 10 ** (-max_decibels / 10) * signal
    return 10 * torch.log10(signal / noise)


State = tuple[Tensor, ...]


class Enhancer(nn.Module):
    """Waveforms [B, S] and sample counts [B] to waveforms [B, S], 0 beyond an utterance's end.

    A frame's mask depends on the frames before it and on ``ahead`` after it, so the output is delayed by ``delay``
    samples, and is the same for an utterance alone, in a batch, and in pieces of any size.

    transform : waveforms to coefficients of frames and back, such as ``FourierFrames``
    mask_network : features of frames to masks: ``CausalConvolutions``, or a module with its ``forward`` and ``state``
    lookahead : of the network, in frames
    """

    def __init__(self, transform: Frames, mask_network: CausalConvolutions, lookahead: int = 0):
        super().__init__()
        if lookahead < 0:
            raise ValueError(f"lookahead is {lookahead}, and must be 0 or more")
        self.transform, self.mask_network, self.ahead = transform, mask_network, lookahead
        self.hop, self.delay = transform.hop, transform.overlap + lookahead * transform.hop

    def forward(self, signals: Tensor, lengths: Tensor) -> Tensor:
        size = signals.shape[1]
        inside = lengths_to_mask(lengths, size)
        frames = (size + self.hop - 1) // self.hop + self.delay // self.hop
        padded = functional.pad(signals.masked_fill(~inside, 0.0), (0, self.hop + self.delay))[:, : frames * self.hop]
        sound, *_ = self.step(padded, self.state(padded.shape[0]))
        return sound[:, self.delay : self.delay + size].masked_fill(~inside, 0.0)

    def state(self, batch: int) -> State:
        """Make the initial state, zeros: the last input samples and the overlap of the output, [B, size - hop] each,
        the frames that wait for their masks, and the network's state."""
        zeros, transform = self.transform.analysis.new_zeros, self.transform
        waiting = [zeros(batch, self.ahead, transform.analysis.shape[1])] if self.ahead else []
        return (zeros(batch, transform.overlap), zeros(batch, transform.overlap), *waiting,
                *self.mask_network.state(batch))

    def step(self, samples: Tensor, state: State) -> tuple[Tensor, ...]:
        """Enhance the next samples [B, T * hop] of streams: returns [B, T * hop], ``delay`` samples later, and the next
        state."""
        before, overlap, *rest = state
        waiting, network = rest[: int(self.ahead > 0)], tuple(rest[int(self.ahead > 0) :])
        signals = torch.cat([before, samples], dim=1)
        with full_precision(samples):
            coefficients = self.transform.analyse(signals)
            features = self.transform.features(coefficients)
        masks, network = self.mask_network(features, network)
        coefficients = torch.cat([*waiting, coefficients], dim=1)
        waiting = [coefficients[:, masks.shape[1] :]] if self.ahead else []
        coefficients = coefficients[:, : masks.shape[1]]
        with full_precision(samples):
            sound = self.transform.synthesise(self.transform.masked(coefficients, masks.float()))
        count = samples.shape[1]
        sound = sound + functional.pad(overlap, (0, count))
        return sound[:, :count], signals[:, count:], sound[:, count:], *waiting, *network
