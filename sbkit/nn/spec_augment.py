"""SpecAugment on the device: masks in time and frequency, and a time warp, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sbkit.nn.lengths import lengths_to_mask


class SpecAugment(nn.Module):
    """Mask stretches of frames and bands of features; in evaluation mode, nothing.

    No parameters, no loop over utterances, and no value ever leaves the device. The random numbers are
    the device's own, so a run that restores its generators repeats them.

    Arguments
    ---------
    time_masks: stretches per utterance.
    time_share: the longest stretch, as a share of the utterance (0.05: of 10 s at most 0.5 s each).
    frequency_masks: bands per utterance.
    frequency_width: the widest band, in features.
    time_warp: an utterance is stretched before a random frame and squeezed behind it, or the other way
        round, by at most so many frames; 0: not at all.
    fill: what masked values become: ``mean`` of the utterance, or ``zero``.
    ramp: ``[a, b]``: no mask as long as the model hears less than ``a`` (see ``follow``), from there on wider and
        wider ones, the whole from ``b`` on; ``null``: the whole from the first step.

    >>> features = torch.randn(4, 100, 80)
    >>> SpecAugment()(features, torch.tensor([100, 80, 60, 3])).shape
    torch.Size([4, 100, 80])
    """

    def __init__(self, time_masks: int = 5, time_share: float = 0.05, frequency_masks: int = 2,
                 frequency_width: int = 27, time_warp: int = 0, fill: str = "mean",
                 ramp: Sequence[float] | None = None):
        super().__init__()
        if not 0 <= time_share <= 1:
            raise ValueError(f"time_share is {time_share}, not a share between 0 and 1")
        if min(time_masks, frequency_masks, frequency_width, time_warp) < 0:
            raise ValueError("time_masks, frequency_masks, frequency_width, time_warp: not below 0")
        if fill not in ("mean", "zero"):
            raise ValueError(f"fill is {fill!r}; it is one of mean, zero")
        self.time_masks, self.time_share = time_masks, time_share
        self.frequency_masks, self.frequency_width = frequency_masks, frequency_width
        if ramp is not None and not (len(ramp) == 2 and 0 <= ramp[0] <= ramp[1] <= 1):
            raise ValueError(f"ramp is {ramp!r}, not two shares between 0 and 1, the smaller one first")
        self.time_warp, self.fill, self.ramp = time_warp, fill, ramp
        self.strength = 1.0
        """How wide masks are, of what the arguments say; without anybody to ``follow``, all of it."""

    def follow(self, heard: float) -> None:
        """Set the strength for a model that hears so much, of 0 (chance) to 1 (no loss)."""
        if self.ramp is not None:
            begin, whole = self.ramp
            self.strength = min(1.0, max(0.0, (heard - begin) / (whole - begin))) if heard < whole else 1.0

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Features ``[B, T, F]`` and frame counts ``[B]`` (all T where absent) to features ``[B, T, F]``.

        Padding, the frames behind an utterance's length, comes out as it went in.
        """
        if not self.training:
            return features
        batch, time, bands = features.shape
        device = features.device
        if lengths is None:
            lengths = torch.full((batch,), time, device=device)
        exists = lengths_to_mask(lengths, time)
        if self.time_warp:
            features = torch.where(exists[..., None], self._warped(features, lengths), features)
        counts = lengths[:, None].expand(batch, self.time_masks)
        masked = _stretches(counts, counts * (self.time_share * self.strength), time)[:, :, None] & exists[..., None]
        if self.frequency_masks:
            widths = torch.full((batch, self.frequency_masks), bands, device=device)
            widest = widths.clamp(max=self.frequency_width) * self.strength
            banned = _stretches(widths, widest, bands)
            masked = masked | banned[:, None, :] & exists[..., None]
        if self.fill == "zero":
            return features.masked_fill(masked, 0.0)
        total = features.masked_fill(~exists[..., None], 0.0).sum((1, 2), dtype=torch.float32)
        mean = total / (lengths.clamp(min=1) * bands)
        return torch.where(masked, mean[:, None, None].to(features.dtype), features)

    def _warped(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Each utterance read along a path of two straight pieces that meet at a random frame."""
        last = (lengths - 1).float()[:, None]
        # The joint and where it moves to stay inside of the utterance, however short it is.
        reach = torch.minimum(torch.full_like(last, self.time_warp * self.strength), (last - 1).clamp(min=0) / 2)
        draw = torch.rand(2, len(lengths), 1, device=features.device)
        joint = reach + draw[0] * (last - 2 * reach)
        moved = joint + (2 * draw[1] - 1) * reach * 0.999
        at = torch.arange(features.shape[1], device=features.device)[None, :].float()
        before = at * joint / moved.clamp(min=1e-3)
        behind = joint + (at - moved) * (last - joint) / (last - moved).clamp(min=1e-3)
        source = torch.where(at < moved, before, behind).clamp(min=0)
        source = torch.minimum(source, last.clamp(min=0))
        left = source.floor().long()
        right = torch.minimum(left + 1, last.long().clamp(min=0))
        part = (source - left)[..., None].to(features.dtype)

        def index(place: Tensor) -> Tensor:
            return place[..., None].expand(-1, -1, features.shape[2])

        return features.gather(1, index(left)) * (1 - part) + features.gather(1, index(right)) * part

    def extra_repr(self) -> str:
        return (f"time_masks={self.time_masks}, time_share={self.time_share}, "
                f"frequency_masks={self.frequency_masks}, frequency_width={self.frequency_width}, "
                f"time_warp={self.time_warp}, ramp={self.ramp}")


def _stretches(sizes: Tensor, widest: Tensor, size: int) -> Tensor:
    """N random stretches per row, at most ``widest`` long, within ``sizes`` (``[B, N]``): ``[B, size]``."""
    draw = torch.rand(2, *sizes.shape, device=sizes.device)
    width = (draw[0] * (widest.floor() + 1)).floor()
    start = (draw[1] * (sizes - width + 1)).floor()
    at = torch.arange(size, device=sizes.device)
    return ((at >= start[..., None]) & (at < (start + width)[..., None])).any(1)
