"""Two augmented views of the same utterances should be heard alike: the loss of CR-CTC."""

from __future__ import annotations

import torch
from torch import Tensor

from sbkit.nn.lengths import lengths_to_mask


def consistency(log_probs: Tensor, frames: Tensor) -> Tensor:
    """How much each view departs from the other, summed over frames: a scalar.

    Each is drawn to where the other is now: what a view says is a target, without a gradient.

    log_probs : [2 B, T, V], the second view of an utterance B rows below its first
    frames : [2 B] int64; frames behind them don't count
    """
    target = torch.cat(log_probs.detach().chunk(2)[::-1])
    apart = (target.exp() * (target - log_probs)).sum(-1)  # [2 B, T]
    return apart.masked_fill(~lengths_to_mask(frames, log_probs.shape[1]), 0.0).sum()
