"""Signal-to-noise ratios of waveforms, in decibels: plain, and whatever the scale."""

from __future__ import annotations

import torch
from torch import Tensor

from sbkit.nn.lengths import lengths_to_mask

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
