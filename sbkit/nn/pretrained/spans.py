"""Masks spans of time and of features in training, as in the pretraining of these encoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sbkit.errors import SbkitError


@dataclass(frozen=True)
class MaskSpans:
    """How much of an axis to mask.

    share : share of the axis to mask; less is masked where spans overlap
    length : length of a span
    least : smallest number of spans, if the axis is long enough
    """

    share: float
    length: int
    least: int = 0

    @classmethod
    def of(cls, config: dict[str, Any], axis: str, share: float | None, length: int | None) -> MaskSpans:
        """Take a recipe's values for an axis (``time`` or ``feature``); those of the encoder's config where None."""
        own = config.get(f"mask_{axis}_prob", 0.0) if config.get("apply_spec_augment", True) else 0.0
        share = own if share is None else share
        length = config.get(f"mask_{axis}_length", 10) if length is None else length
        if not 0 <= share <= 1:
            raise SbkitError(f"mask_{axis}_prob is {share}, not a share between 0 and 1")
        if length < 1:
            raise SbkitError(f"mask_{axis}_length is {length}, but must be at least 1")
        return cls(float(share), int(length), int(config.get(f"mask_{axis}_min_masks", 0)))

    def draw(self, counts: Tensor, size: int) -> Tensor:
        """Draw a mask [B, size], True in spans, for axes with ``counts`` [B] valid places.

        It uses torch's generator of the device of ``counts``, without a host sync. Axes shorter than a span get none.
        """
        batch = len(counts)
        wanted = (self.share * counts / self.length + torch.rand(batch, device=counts.device)).long()
        last = counts - self.length  # last place where a span may start
        wanted = wanted.clamp(min=self.least).minimum((last + 1).clamp(min=0))
        most = min(size, max(self.least, int(self.share * size / self.length) + 1))
        drawn = torch.rand(batch, size, device=counts.device)
        drawn = drawn.masked_fill(torch.arange(size, device=counts.device) > last[:, None], -1.0)
        starts = drawn.topk(most, dim=1).indices
        used = torch.arange(most, device=counts.device) < wanted[:, None]
        begins = torch.zeros(batch, size, device=counts.device).scatter(1, starts, used.float())
        return functional.max_pool1d(functional.pad(begins, (self.length - 1, 0))[:, None], self.length, 1)[:, 0] > 0


def mask(states: Tensor, counts: Tensor, time: MaskSpans, feature: MaskSpans, fill: Tensor | None = None) -> Tensor:
    """Mask spans of time and of features in states [B, T, F] with ``counts`` [B] valid frames.

    fill : [F], the value of masked frames; None: zeros. Masked features become zero
    """
    if time.share:
        hidden = time.draw(counts, states.shape[1])[..., None]
        states = torch.where(hidden, torch.zeros_like(states[0, 0]) if fill is None else fill.to(states.dtype), states)
    if feature.share:
        width = torch.full_like(counts, states.shape[2])
        states = states.masked_fill(feature.draw(width, states.shape[2])[:, None], 0.0)
    return states
