"""CTC loss with exact lengths: per utterance, in fp32, and honest about utterances too short for it."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sbkit.nn.guard import guard_indices, has_values

logger = logging.getLogger(__name__)

MOST_TOKENS = 1023
"""Labels of the longest utterance that sbkit's kernels take: 2 x 1023 + 1 states fit into a block of 2048."""


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
    def count(self) -> torch.Tensor:  # type: ignore[override]  # of a tuple it hides a method that nobody calls
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
    ids: Sequence[str] | None = None,
) -> CTCLoss:
    """Negative log-likelihood of ``targets`` under CTC.

    An utterance with fewer frames than CTC needs has no alignment: its loss is infinite. It is found here
    (``feasible``), left out of the sum, and given no gradient. An infinite loss of a feasible utterance is a
    broken model and stays visible.

    On CUDA the recursions are sbkit's own kernels, which read the lengths where they are: no host sync.
    torch's kernels take over where those can't run (no Triton, fp64, more than 1023 labels), and they wait
    for the device several times.

    Arguments
    ---------
    log_probs: [B, T, V] logits, or log-probabilities with ``from_logits=False``; any float type. The loss is
        computed in fp32 (fp64 when given fp64)
    targets: [B, U] int64 labels; what lies beyond the lengths is never looked at. A label outside [0, V) or
        a blank is caught by ``sbkit.nn.guard``
    input_lengths, target_lengths: [B] int64, frames and labels
    host_lengths: the same two lengths on the CPU; given, a length that can't be is an error at once, and
        torch's kernels needn't read them back. Without, its loss on a device is nan
    ids: the utterances, for the guard's message
    """
    width, depth = log_probs.shape[1], targets.shape[1]
    if host_lengths is None and input_lengths.device.type == target_lengths.device.type == "cpu":
        host_lengths = input_lengths, target_lengths
    if host_lengths is not None and has_values(host_lengths[0]):
        _check_lengths("input_lengths", host_lengths[0], width)
        _check_lengths("target_lengths", host_lengths[1], depth)
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
        if not has_values(log_probs):
            losses = _by_sizes(log_probs, targets)
        elif _use_kernels(log_probs, targets):
            losses = _by_kernels(log_probs, targets, frames, labels, blank)
        else:
            on_host = host_lengths if host_lengths is not None else (input_lengths, target_lengths)
            losses = _by_torch(log_probs, targets, *on_host, blank)
        feasible = ctc_frames_needed(targets, labels) <= frames
        return CTCLoss(torch.where(feasible, losses, torch.zeros_like(losses)), feasible)


def _check_lengths(name: str, lengths: torch.Tensor, most: int) -> None:
    if lengths.is_floating_point():
        raise ValueError(f"{name} must be integers, counts of frames or labels, got {lengths.dtype}")
    values = lengths.numpy()
    if len(values) and (values.min() < 0 or values.max() > most):
        raise ValueError(f"{name} must lie in 0 .. {most}, got {values.min()} .. {values.max()}")


def _by_torch(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
    target_lengths: torch.Tensor, blank: int,
) -> torch.Tensor:
    # Called below torch.nn.functional, zero_infinity touches the gradient alone: an infinite loss stays so.
    losses, _ = torch._ctc_loss(
        log_probs.transpose(0, 1), targets, input_lengths.tolist(), target_lengths.tolist(), blank,
        zero_infinity=True,
    )
    return losses


def _by_sizes(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of tensors that have no values: something of the right shape that holds what the recursions keep for backward."""
    states = log_probs.new_empty(*log_probs.shape[:2], 2 * targets.shape[1] + 1)
    return log_probs.sum((1, 2)) + states.sum((1, 2))


def _by_kernels(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor,
    target_lengths: torch.Tensor, blank: int,
) -> torch.Tensor:
    from sbkit.nn.ctc_kernels import Sequences

    width, depth = log_probs.shape[1], targets.shape[1]
    columns = torch.cat([torch.full_like(targets[:, :1], blank), targets], 1)
    emit = log_probs.gather(2, columns.unsqueeze(1).expand(-1, width, -1))
    wrong = (input_lengths > width) | (target_lengths > depth)
    losses = Sequences.apply(emit, targets, input_lengths.clamp(max=width), target_lengths.clamp(max=depth),
                             _block(depth))
    return torch.where(wrong, torch.full_like(losses, math.nan), losses)


def _use_kernels(log_probs: torch.Tensor, targets: torch.Tensor) -> bool:
    return (
        log_probs.device.type == "cuda" and log_probs.dtype == torch.float32
        and targets.shape[1] <= MOST_TOKENS and _kernels_work(log_probs.device, _block(targets.shape[1]))
    )


def _block(tokens: int) -> int:
    """The power of two that holds the states of so many labels: 2 x tokens + 1.

    >>> [_block(tokens) for tokens in (1, 15, 16, 31, 32, 1023)]
    [32, 32, 64, 64, 128, 2048]
    """
    return max(32, 1 << (2 * tokens).bit_length())


@functools.cache
def _kernels_work(device: torch.device, block: int) -> bool:
    """Once per device and block: do the kernels compile there and give what torch gives on the CPU?

    Each block is made into kernels of its own, whose states are shared by other threads and warps: what is right of
    one says nothing of the next. It's compiled for its first batch anyway, and kept on disk by Triton; looking at it
    takes a fraction of a second besides.
    """
    mode = torch.cuda.get_sync_debug_mode()
    if mode:  # setting it is worth a warning to torch
        torch.cuda.set_sync_debug_mode(0)  # this one comparison may wait
    try:
        with torch.enable_grad():
            (losses, grad), (mine, my_grad) = (_rehearse(_by_torch, torch.float64, "cpu", block),
                                               _rehearse(_by_kernels, torch.float32, device, block))
        # A gradient is exp(alpha + beta + loss), of some thousand each: what fp32 rounds off grows with the length.
        if torch.allclose(losses, mine, rtol=1e-4, atol=1e-4) and torch.allclose(grad, my_grad, rtol=0,
                                                                                 atol=1e-5 * block):
            return True
        reason = "they give other values than torch's"
    except Exception as error:  # no Triton, no compiler, an unknown card: torch's kernels do it, more slowly
        reason = f"{type(error).__name__}: {error}"
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)
    logger.warning("sbkit's CTC kernels for up to %d labels can't be used on %s, torch's are (they make the host "
                   "wait): %s", (block - 1) // 2, device, reason)
    return False


def _rehearse(
    by: Callable[..., torch.Tensor], dtype: torch.dtype, device: torch.device | str, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradient of an example that fills a block, on the CPU: long, short, impossible and empty."""
    labels = (block - 1) // 2
    frames = 4 * labels // 3 + 15
    logits = torch.arange(4 * frames * 11).double().sin_().mul_(4).float().reshape(4, frames, 11)
    logits = logits.to(device, dtype).requires_grad_()
    targets = (torch.arange(4 * labels).reshape(4, labels) * 3 // 4 % 6 + 1).to(device)  # one in four says it again
    lengths = torch.tensor([[frames, frames // 4, 2, 1], [labels, labels // 8, 3, 0]]).to(device)
    losses = by(logits.log_softmax(-1), targets, *lengths, 0)
    losses.sum().backward()
    assert logits.grad is not None, "backward gave it"
    return losses.detach().cpu().float(), logits.grad.cpu().float()
