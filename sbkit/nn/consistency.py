"""The consistency loss of CR-CTC: two augmented views of an utterance should give the same outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from sbkit.nn.lengths import lengths_to_mask


def consistency(log_probs: Tensor, frames: Tensor) -> Tensor:
    """Compute the KL divergence of each view from the other, summed over frames: a scalar.

    The view that serves as the target gets no gradient.

    Arguments
    ---------
    log_probs : [2 B, T, V], the first views of all utterances, then their second views
    frames : [2 B] int64, frame counts; padding is ignored
    """
    target = torch.cat(log_probs.detach().chunk(2)[::-1])
    divergence = (target.exp() * (target - log_probs)).sum(-1)  # [2 B, T]
    return divergence.masked_fill(~lengths_to_mask(frames, log_probs.shape[1]), 0.0).sum()
