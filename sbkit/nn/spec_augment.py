"""SpecAugment on the device: masks in time and frequency, and a time warp, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sbkit.nn.device_numbers import DeviceNumbers
from sbkit.nn.lengths import lengths_to_mask


class SpecAugment(nn.Module):
    """Masks spans of frames and bands of features in training; does nothing in evaluation mode.

    It has no parameters, does not loop over utterances and never syncs with the device. Random numbers come from the
    device's generator, so a resumed run repeats them. Rows without frames get none, so that the masks of the others are
    the same as without these rows.

    time_masks: spans per utterance.
    time_share: the longest span, as a share of the utterance (with 0.05, at most 0.5 s of 10 s).
    frequency_masks: bands per utterance.
    frequency_width: the widest band, in features.
    time_warp: an utterance is stretched before a random frame and squeezed after it, or the other way round, by at most
        this many frames; 0: no warping.
    fill: the value of masked features: ``mean`` of the utterance, or ``zero``.
    ramp: ``[a, b]``: no masks while the model's score (see ``set_score``) is below ``a``, then wider ones as it rises,
        and the full width from ``b`` on, which may equal ``a``; ``null``: the full width from the first step.

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
        counts = {"time_masks": time_masks, "frequency_masks": frequency_masks, "frequency_width": frequency_width,
                  "time_warp": time_warp}
        for name, value in counts.items():
            if value < 0:
                raise ValueError(f"{name} is {value}, but must not be below 0")
        if fill not in ("mean", "zero"):
            raise ValueError(f"fill is {fill!r}, but must be mean or zero")
        if ramp is not None and not _is_ramp(ramp):
            raise ValueError(f"ramp is {ramp!r}, not two shares between 0 and 1, the smaller one first")
        self.time_masks = time_masks
        self.time_share = time_share
        self.frequency_masks = frequency_masks
        self.frequency_width = frequency_width
        self.time_warp = time_warp
        self.fill = fill
        self.ramp = ramp
        # What limits a time mask, a band and the warp. Products are rounded once, by the host.
        self._limits = DeviceNumbers([time_share, 1.0, time_warp])

    @property
    def strength(self) -> float:
        """Share of the full width that masks have now; 1 unless ``set_score`` changes it."""
        return self._limits.numbers[1]

    def set_score(self, score: float) -> None:
        """Set the strength for a model's score, between 0 (chance) and 1 (no loss)."""
        if self.ramp is None:
            return
        begin, full = self.ramp
        if score < begin:
            strength = 0.0
        elif score < full:  # so begin is below full
            strength = (score - begin) / (full - begin)
        else:
            strength = 1.0
        self._limits.write([self.time_share * strength, strength, self.time_warp * strength])

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Features ``[B, T, F]`` and frame counts ``[B]`` (None: all T) to ``[B, T, F]``; padding is unchanged."""
        if not self.training:
            return features
        batch, time, bands = features.shape
        device = features.device
        if lengths is None:
            lengths = torch.full((batch,), time, device=device)
        real = lengths_to_mask(lengths, time)
        longest, strength, reach = self._limits.on(device)
        sizes = [1 if self.time_warp else 0, self.time_masks, self.frequency_masks]
        draw = torch.rand(batch, sum(sizes), 2, device=device)
        draw = draw[((lengths > 0).cumsum(0) - 1).clamp(min=0)]  # the first numbers are those of the rows with frames
        of_warp, of_time, of_frequency = draw.split(sizes, 1)
        if self.time_warp:
            warped = self._warped(features, lengths, reach, of_warp[:, 0])
            features = torch.where(real[..., None], warped, features)
        counts = lengths[:, None].expand(batch, self.time_masks)
        masked = _spans(of_time, counts, counts * longest, time)[:, :, None] & real[..., None]
        if self.frequency_masks:
            widths = torch.full((batch, self.frequency_masks), bands, device=device)
            widest = widths.clamp(max=self.frequency_width) * strength
            masked = masked | _spans(of_frequency, widths, widest, bands)[:, None, :] & real[..., None]
        if self.fill == "zero":
            return features.masked_fill(masked, 0.0)
        total = features.masked_fill(~real[..., None], 0.0).sum((1, 2), dtype=torch.float32)
        mean = total / (lengths.clamp(min=1) * bands)
        return torch.where(masked, mean[:, None, None].to(features.dtype), features)

    def _warped(self, features: Tensor, lengths: Tensor, reach: Tensor, draw: Tensor) -> Tensor:
        """Warp each utterance's time, piecewise linearly with two pieces that meet at a frame; both this and its new
        place follow from ``draw`` [B, 2]."""
        last = (lengths - 1).float()[:, None]
        # Limits the warp so that the joint and its new place are inside the utterance, however short it is.
        reach = torch.minimum(reach, (last - 1).clamp(min=0) / 2)
        joint = reach + draw[:, :1] * (last - 2 * reach)
        moved = joint + (2 * draw[:, 1:] - 1) * reach * 0.999
        at = torch.arange(features.shape[1], device=features.device)[None, :].float()
        before = at * joint / moved.clamp(min=1e-3)
        after = joint + (at - moved) * (last - joint) / (last - moved).clamp(min=1e-3)
        source = torch.where(at < moved, before, after).clamp(min=0)
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


def _is_ramp(ramp: object) -> bool:
    if not isinstance(ramp, Sequence) or len(ramp) != 2 or not all(isinstance(share, (int, float)) for share in ramp):
        return False
    return 0 <= ramp[0] <= ramp[1] <= 1


def _spans(draw: Tensor, sizes: Tensor, widest: Tensor, size: int) -> Tensor:
    """Mask N spans per row, [B, size]: at most ``widest`` long, within ``sizes`` ([B, N]), by random numbers [B, N, 2].
    """
    width = (draw[..., 0] * (widest.floor() + 1)).floor()
    start = (draw[..., 1] * (sizes - width + 1)).floor()
    at = torch.arange(size, device=sizes.device)
    return ((at >= start[..., None]) & (at < (start + width)[..., None])).any(1)
