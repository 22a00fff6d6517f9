"""Spans that are masked in training, over time and over features, as these encoders were pretrained with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Spans:
    """How much of an axis is masked.

    share : of the axis, if no two spans lay on another
    length : of a span
    least : spans of an axis at least, if it is long enough
    """

    share: float
    length: int
    least: int = 0

    @classmethod
    def of(cls, config: dict[str, Any], axis: str, share: float | None, length: int | None) -> Spans:
        """What a recipe says of an axis (``time`` or ``feature``), else what the encoder's config says."""
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"mask_{axis}_prob is {share}, not a share between 0 and 1")
        if length is not None and length < 1:
            raise ValueError(f"mask_{axis}_length is {length}; a span has at least 1")
        found = config.get(f"mask_{axis}_prob", 0.0) if share is None else share
        long = config.get(f"mask_{axis}_length", 10) if length is None else length
        return cls(float(found), int(long), int(config.get(f"mask_{axis}_min_masks", 0)))

    def draw(self, counts: Tensor, size: int) -> Tensor:
        """True where a span lies: of axes with so many places [B] to [B, size].

        The numbers are torch's, of the device that ``counts`` is on, and nothing waits for it. An axis shorter than
        a span gets none.
        """
        batch = len(counts)
        wanted = (self.share * counts / self.length + torch.rand(batch, device=counts.device)).long()
        last = counts - self.length  # where a span may begin at the latest
        wanted = wanted.clamp(min=self.least).minimum((last + 1).clamp(min=0))
        most = min(size, max(self.least, int(self.share * size / self.length) + 1))
        drawn = torch.rand(batch, size, device=counts.device)
        drawn = drawn.masked_fill(torch.arange(size, device=counts.device) > last[:, None], -1.0)
        starts = drawn.topk(most, dim=1).indices
        used = torch.arange(most, device=counts.device) < wanted[:, None]
        begins = torch.zeros(batch, size, device=counts.device).scatter(1, starts, used.float())
        return functional.max_pool1d(functional.pad(begins, (self.length - 1, 0))[:, None], self.length, 1)[:, 0] > 0


def mask(states: Tensor, counts: Tensor, time: Spans, feature: Spans, fill: Tensor | None = None) -> Tensor:
    """States [B, T, F], of which each utterance has so many [B], with spans of time filled and of features zeroed.

    fill : [F], what a masked state becomes; zeros where absent
    """
    if time.share:
        hidden = time.draw(counts, states.shape[1])[..., None]
        states = torch.where(hidden, torch.zeros_like(states[0, 0]) if fill is None else fill.to(states.dtype), states)
    if feature.share:
        width = torch.full_like(counts, states.shape[2])
        states = states.masked_fill(feature.draw(width, states.shape[2])[:, None], 0.0)
    return states
