"""CTC loss with exact lengths: per utterance, in fp32, and honest about utterances too short for it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class CTCLoss(NamedTuple):
    """What ``ctc_loss`` found.

    ``losses`` [B]: negative log-likelihood per utterance (fp32), 0 where infeasible, with no gradient there.
    ``feasible`` [B] bool: whether the utterance has the frames that its labels need.
    """

    losses: torch.Tensor
    feasible: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """Sum over feasible utterances, a scalar."""
        return self.losses.sum()

    @property
    def count(self) -> torch.Tensor:
        """How many utterances are feasible, a scalar int64 tensor on the device."""
        return self.feasible.sum()


def ctc_frames_needed(targets: torch.Tensor, target_lengths: torch.Tensor) -> torch.Tensor:
    """Frames that CTC needs at least: a frame per label, and a blank between two equal neighbours.

    targets: [B, U] integers; target_lengths: [B] int64. Returns [B] int64.

    >>> ctc_frames_needed(torch.tensor([[5, 5, 6], [5, 6, 0]]), torch.tensor([3, 2])).tolist()
    [4, 2]
    """
    if targets.shape[1] < 2:
        return target_lengths
    second = torch.arange(1, targets.shape[1], device=targets.device)
    repeats = (targets[:, 1:] == targets[:, :-1]) & (second < target_lengths.unsqueeze(1))
    return target_lengths + repeats.sum(1)


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    from_logits: bool = True,
    host_lengths: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> CTCLoss:
    """Negative log-likelihood of ``targets`` under CTC.

    An utterance with fewer frames than CTC needs has no alignment: its loss is infinite. It is found here
    (``feasible``), left out of the sum, and given no gradient. An infinite loss of a feasible utterance is a
    broken model and stays visible.

    Arguments
    ---------
    log_probs: [B, T, V] logits, or log-probabilities with ``from_logits=False``; any float type. The loss is
        computed in fp32 (fp64 when given fp64)
    targets: [B, U] int64 labels, padded with anything inside [0, V)
    input_lengths, target_lengths: [B] int64, frames and labels
    host_lengths: the same two lengths on the CPU; given, nothing waits for the device to read them back
    """
    with torch.autocast(log_probs.device.type, enabled=False):
        log_probs = log_probs if log_probs.dtype == torch.float64 else log_probs.float()
        if from_logits:
            log_probs = log_probs.log_softmax(-1)
        frames, labels = host_lengths if host_lengths is not None else (input_lengths, target_lengths)
        # zero_infinity touches the gradient alone here: the losses come back as they are, infinite ones too.
        losses, _ = torch._ctc_loss(
            log_probs.transpose(0, 1), targets, frames.tolist(), labels.tolist(), blank, zero_infinity=True
        )
        feasible = ctc_frames_needed(targets, target_lengths) <= input_lengths
        return CTCLoss(torch.where(feasible, losses, torch.zeros_like(losses)), feasible)
