"""Waveforms to waveforms with less noise, by masks over frames: whole, and piece by piece with the same samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.enhance.network import CausalConvolutions
from sbkit.nn.enhance.transform import Frames
from sbkit.nn.kaldi import full_precision
from sbkit.nn.lengths import lengths_to_mask

State = tuple[Tensor, ...]


class Enhancer(nn.Module):
    """Waveforms [B, S] and sample counts [B] to waveforms [B, S], 0 beyond an utterance's end.

    A frame's mask depends on it, on those before it and on ``ahead`` behind it, so what is heard can be given out
    ``delay`` samples later, and an utterance has the same samples alone, in a batch, and in pieces of any size.

    Arguments
    ---------
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
