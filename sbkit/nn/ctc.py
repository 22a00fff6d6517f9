"""CTC loss per utterance, in fp32, with exact lengths and a flag for utterances that are too short for CTC."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sbkit.nn.guard import guard_indices, has_values
from sbkit.nn.lengths import lengths_to_mask
from sbkit.nn.native import trial

MAX_TOKENS = 1023
"""The most labels per utterance that sbkit's kernels take: 2 x 1023 + 1 states fit into a block of 2048."""


class CTCLoss(NamedTuple):
    """The result of ``ctc_loss``.

    ``losses`` [B]: negative log-likelihood per utterance (fp32); 0 without a gradient where infeasible.
    ``feasible`` [B] bool: whether the utterance has as many frames as its labels need.
    """

    losses: torch.Tensor
    feasible: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """The sum over feasible utterances, a scalar."""
        return self.losses.sum()


def ctc_frames_needed(targets: torch.Tensor, target_lengths: torch.Tensor) -> torch.Tensor:
    """Compute the smallest number of frames for CTC: one per label, and one for the blank between two equal labels.

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
    ids: Sequence[str] | None = None,
    real: torch.Tensor | None = None,
) -> CTCLoss:
    """Compute the negative log-likelihood of ``targets`` under CTC.

    An utterance with fewer frames than CTC needs has no alignment and an infinite loss. Such utterances are not
    ``feasible``: their loss is 0 without a gradient. An infinite loss of a feasible utterance means that the model is
    broken, so it is kept.

    On CUDA, sbkit's own kernels read the lengths on the device, without a host sync. If they can't run (no Triton,
    fp64, more than 1023 labels), torch's kernels are used, which sync several times.

    log_probs: [B, T, V] logits, or log-probabilities with ``from_logits=False``; any float type. The loss is
        computed in fp32 (fp64 when given fp64)
    targets: [B, U] int64 labels; padding may have any value. Blanks and labels outside [0, V) are reported by
        ``sbkit.nn.guard``
    input_lengths, target_lengths: [B] int64, numbers of frames and of labels. Impossible ones raise if both are on the
        CPU; on a device they make the loss NaN
    ids: the utterances, for the guard's messages
    real: [B] bool, False for rows that are no utterances, which are not ``feasible`` either
    """
    width, depth = log_probs.shape[1], targets.shape[1]
    if input_lengths.device.type == target_lengths.device.type == "cpu" and has_values(input_lengths):
        _check_lengths("input_lengths", input_lengths, width)
        _check_lengths("target_lengths", target_lengths, depth)
    device = log_probs.device
    frames = input_lengths.to(device, non_blocking=True)
    labels = target_lengths.to(device, non_blocking=True)
    if depth == 0:
        targets = torch.full((len(targets), 1), blank, dtype=torch.long, device=device)
    targets = guard_indices(targets, log_probs.shape[2], name="CTC labels", ids=ids, lengths=labels,
                            forbidden=(blank,))
    with torch.autocast(device.type, enabled=False):
        dtype = torch.float64 if log_probs.dtype == torch.float64 else torch.float32
        log_probs = log_probs.log_softmax(-1, dtype=dtype) if from_logits else log_probs.to(dtype)
        if not has_values(log_probs):  # right in shape and in the memory kept for backward
            states = log_probs.new_empty(*log_probs.shape[:2], 2 * targets.shape[1] + 1)
            losses = log_probs.sum((1, 2)) + states.sum((1, 2))
        elif use_kernels(log_probs, targets):
            losses = by_kernels(log_probs, targets, frames, labels, blank)
        else:
            losses = by_torch(log_probs, targets, input_lengths, target_lengths, blank)
        feasible = ctc_frames_needed(targets, labels) <= frames
        if real is not None:
            feasible = feasible & real
        return CTCLoss(torch.where(feasible, losses, torch.zeros_like(losses)), feasible)


def _check_lengths(name: str, lengths: torch.Tensor, maximum: int) -> None:
    if lengths.is_floating_point():
        raise ValueError(f"{name} must be integers, counts of frames or labels, got {lengths.dtype}")
    values = lengths.numpy()
    if len(values) and (values.min() < 0 or values.max() > maximum):
        raise ValueError(f"{name} must lie in 0 .. {maximum}, got {values.min()} .. {values.max()}")


def by_torch(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
    target_lengths: torch.Tensor, blank: int,
) -> torch.Tensor:
    # Unlike torch.nn.functional.ctc_loss, this applies zero_infinity to the gradient alone: infinite losses stay.
    losses, _ = torch._ctc_loss(
        log_probs.transpose(0, 1), targets, input_lengths.tolist(), target_lengths.tolist(), blank,
        zero_infinity=True,
    )
    return losses


def by_kernels(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
    target_lengths: torch.Tensor, blank: int,
) -> torch.Tensor:
    """Compute the losses with sbkit's kernels."""
    from sbkit.nn.ctc_kernels import CTCNegLogLikelihood

    width, depth = log_probs.shape[1], targets.shape[1]
    columns = torch.cat([torch.full_like(targets[:, :1], blank), targets], 1)
    emit = log_probs.gather(2, columns.unsqueeze(1).expand(-1, width, -1))
    impossible = (input_lengths > width) | (target_lengths > depth)
    losses = CTCNegLogLikelihood.apply(emit, targets, input_lengths.clamp(max=width), target_lengths.clamp(max=depth),
                                       block_size(depth))
    return torch.where(impossible, torch.full_like(losses, math.nan), losses)


def use_kernels(log_probs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether these losses are computed with sbkit's kernels."""
    return (
        log_probs.device.type == "cuda" and log_probs.dtype == torch.float32
        and targets.shape[1] <= MAX_TOKENS and kernels_work(log_probs.device, block_size(targets.shape[1]))
    )


def block_size(tokens: int) -> int:
    """Return the power of two that holds the 2 x tokens + 1 states of an utterance.

    >>> [block_size(tokens) for tokens in (1, 15, 16, 31, 32, 1023)]
    [32, 32, 64, 64, 128, 2048]
    """
    return max(32, 1 << (2 * tokens).bit_length())


@functools.cache
def kernels_work(device: torch.device, block: int) -> bool:
    """Whether the kernels compile on a device and agree there with torch on the CPU; tested once per block size.

    Each block size is compiled to separate kernels that distribute the states differently, so each needs its own test.
    """
    def compare() -> bool:
        expected = run_example(by_torch, torch.float64, "cpu", block)
        computed = run_example(by_kernels, torch.float32, device, block)
        # A gradient is exp(alpha + beta + loss), with terms in the thousands: fp32's rounding error grows with length.
        return trial.results_agree(computed, expected, (1e-4, 1e-5 * block))

    return trial.kernels_agree(device, compare, f"CTC kernels for up to {(block - 1) // 2} labels",
                               "torch's are, which sync with the host")


def run_example(
    compute: Callable[..., torch.Tensor], dtype: torch.dtype, device: torch.device | str, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute losses and gradient of a block's largest example: long, short, infeasible and empty utterances."""
    labels = (block - 1) // 2
    frames = 4 * labels // 3 + 15
    logits = torch.arange(4 * frames * 11).double().sin_().mul_(4).float().reshape(4, frames, 11)
    logits = logits.to(device, dtype).requires_grad_()
    targets = (torch.arange(4 * labels).reshape(4, labels) * 3 // 4 % 6 + 1).to(device)  # every fourth label repeats
    lengths = torch.tensor([[frames, frames // 4, 2, 1], [labels, labels // 8, 3, 0]]).to(device)
    losses = compute(logits.log_softmax(-1), targets, *lengths, 0)
    losses.sum().backward()
    assert logits.grad is not None, "backward has set it"
    return losses.detach().cpu().float(), logits.grad.cpu().float()


def consistency(log_probs: Tensor, frames: Tensor) -> Tensor:
    """Compute CR-CTC's consistency loss: the KL divergence between the outputs for two augmented views of an utterance,
    in both directions, summed over frames: a scalar.

    The view that is the target gets no gradient.

    log_probs : [2 B, T, V], the first views of all utterances, then their second views
    frames : [2 B] int64, frame counts; padding is ignored
    """
    target = torch.cat(log_probs.detach().chunk(2)[::-1])
    divergence = (target.exp() * (target - log_probs)).sum(-1)  # [2 B, T]
    return divergence.masked_fill(~lengths_to_mask(frames, log_probs.shape[1]), 0.0).sum()
