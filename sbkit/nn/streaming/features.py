"""Features of a waveform that comes in pieces, equal to those of the whole."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sbkit.nn.kaldi import FilterBank


class FeatureStream:
    """The features of one waveform, computed as its samples come.

    It keeps a few frames' worth of samples, however long the waveform is.

    Arguments
    ---------
    bank : its layer is used as it is, on the device that it is on

    >>> stream = FeatureStream(FilterBank(snip_edges=False))
    >>> [len(stream(piece)) for piece in torch.randn(1000).split(300)], len(stream.flush())
    ([1, 2, 1, 1], 1)
    """

    def __init__(self, bank: FilterBank):
        self.bank = bank
        self.reset()

    def reset(self) -> None:
        """Begin another waveform."""
        self.seen = self.given = self._start = 0
        """Samples that came and frames that were given so far, and the first sample that is kept."""
        self._kept = self.bank.window.new_zeros(0)

    def __call__(self, samples: np.ndarray | Tensor) -> Tensor:
        """Take the next samples [N], any number of them, and return the frames [T, F] that they complete."""
        piece = torch.as_tensor(samples, dtype=torch.float32, device=self._kept.device)
        if piece.dim() != 1:
            raise ValueError(f"a piece of a waveform has the shape {list(piece.shape)}, and must be one row of samples")
        self._kept = torch.cat([self._kept, piece])
        self.seen += len(piece)
        bank = self.bank
        return self._next(max(0, (self.seen - bank.first - bank.size) // bank.hop + 1))

    def flush(self) -> Tensor:
        """Return the frames [T, F] that remain at the waveform's end; then another one may begin."""
        last = self._next(max(0, self.bank.frames(self.seen)))
        self.reset()
        return last

    @torch.no_grad()
    def _next(self, ready: int) -> Tensor:
        """Return the frames up to the number ``ready`` that were not given yet."""
        bank, count = self.bank, max(0, ready - self.given)
        if count == 0:
            return bank.mel.new_zeros(0, bank.mel.shape[1])
        device = self._kept.device
        starts = bank.first + bank.hop * torch.arange(self.given, self.given + count, device=device)
        places = (starts[:, None] + torch.arange(bank.size, device=device)).remainder(2 * self.seen)
        places = torch.minimum(places, 2 * self.seen - 1 - places)  # those beyond an end are in its mirror image
        feats = bank.of_frames(self._kept[places - self._start][None])[0]
        self.given += count
        self._forget()
        return feats

    def _forget(self) -> None:
        """Drop the samples that neither the next frame nor the mirror image at the end will need."""
        start = min(self.bank.first + self.bank.hop * self.given, self.seen - self.bank.size)
        if start > self._start:
            self._kept, self._start = self._kept[start - self._start:].clone(), start
