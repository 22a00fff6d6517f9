"""The transducer's loss and its prediction network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.nn.guard import guard_indices, has_values

MAX_SIZE, MAX_CONTEXT = 1 << 16, 16  # that a bundle may have
_NEVER = -1e30  # the logarithm of an impossible event; finite, so that the difference of two is not NaN


class TransducerHead(nn.Module):
    """Prediction and joint network: scores of the next token from the last tokens and a frame of the encoder.

    The prediction network is an embedding and a convolution over the last ``context`` tokens, so the state of a search
    or a stream is only these tokens.

    vocabulary : number of tokens; ``blank`` pads those before the first
    encoder_size : D of the encoder's states
    size : J, the size of the states that are joined
    """

    def __init__(self, vocabulary: int, encoder_size: int, size: int = 256, context: int = 2, blank: int = 0):
        super().__init__()
        for name, value, maximum in (("size", size, MAX_SIZE), ("context", context, MAX_CONTEXT)):
            if not 1 <= value <= maximum:
                raise SbkitError("bad-value", f"{name} is {value}, and must be 1 to {maximum}", key=name, value=value)
        self.vocabulary = vocabulary
        self.size = size
        self.context = context
        self.blank = blank
        self.of_encoder = nn.Linear(encoder_size, size)
        self.embedding = nn.Embedding(vocabulary, size)
        self.convolution = nn.Conv1d(size, size, context, groups=math.gcd(size, max(1, size // 4)), bias=False)
        self.of_prediction = nn.Linear(size, size)
        self.out = nn.Linear(size, vocabulary)

    def with_start(self, tokens: Tensor) -> Tensor:
        """Pad tokens [B, U] on the left with blanks, from which the first is predicted: [B, context + U]."""
        return functional.pad(tokens, (self.context, 0), value=self.blank)

    def predict(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, context - 1 + U] to states [B, U, J], each of the last ``context`` tokens."""
        embedded = self.embedding(tokens).transpose(1, 2)
        return self.of_prediction(functional.relu(self.convolution(embedded).transpose(1, 2)))

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Map states [..., J] of ``of_encoder`` and of :meth:`predict` to scores [..., V] of what follows both."""
        return self.out((encoded + predicted).tanh_())  # in place: in training these are the largest tensors


def transducer_loss(logits: Tensor, targets: Tensor, frames: Tensor, target_lengths: Tensor, blank: int = 0,
                    ids: Sequence[str] | None = None) -> Tensor:
    """Compute each utterance's negative log-likelihood [B], summed over all paths, without a host sync.

    logits : [B, T, U + 1, V] scores of what follows frame t and u tokens
    targets : [B, U] int64 labels; padding may have any value
    frames, target_lengths : [B] int64, numbers of frames, at least 1, and of labels
    ids : the utterances, for the messages of ``sbkit.nn.guard``
    """
    targets = guard_indices(targets, logits.shape[3], name="transducer labels", ids=ids, lengths=target_lengths,
                            forbidden=(blank,))
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return _NegLogLikelihood.apply(logits, targets, frames, target_lengths, blank)


class _NegLogLikelihood(torch.autograd.Function):
    """Sums over the lattice of frames and tokens, in fp64: every probability is a difference of large sums."""

    @staticmethod
    def forward(ctx: Any,  # torch's context of a function
                logits: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int) -> Tensor:
        total = logits.logsumexp(-1)
        silent = (logits[..., blank] - total).double()
        label = (logits[:, :, :-1].gather(3, targets[:, None, :, None].expand(-1, logits.shape[1], -1, 1))[..., 0]
                 - total[:, :, :-1]).double()
        # Nothing is emitted beyond an utterance's end: its last blank leads out of the lattice.
        time = torch.arange(logits.shape[1], device=logits.device)
        token = torch.arange(logits.shape[2], device=logits.device)
        inside = (time < frames[:, None])[:, :, None] & (token <= lengths[:, None])[:, None]
        last = (time == frames[:, None] - 1)[:, :, None] & (token == lengths[:, None])[:, None]
        silent = silent.where(inside, 0.0)
        label = label.where((inside & (token < lengths[:, None])[:, None])[:, :, :-1], _NEVER)
        before = _sums(silent, label)
        likelihood = before.masked_fill(~last, 0.0).sum((1, 2)) + silent.masked_fill(~last, 0.0).sum((1, 2))
        ctx.blank = blank
        ctx.save_for_backward(logits, total, targets, silent, label, before, inside, last, likelihood)
        return -likelihood.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any,  # torch's context of a function
                 *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, total, targets, silent, label, before, inside, last, likelihood = ctx.saved_tensors
        after = _sums_back(silent, label, last)
        here = likelihood[:, None, None]
        following = functional.pad(after[:, 1:], (0, 0, 0, 1), value=_NEVER).where(~last, 0.0)
        of_silent = ((before + silent + following - here).exp() * inside).to(logits.dtype)
        of_label = functional.pad((before[:, :, :-1] + label + after[:, :, 1:] - here).exp().to(logits.dtype), (0, 1))
        scale = grads[0][:, None, None]
        of_silent = of_silent * scale
        of_label = of_label * scale
        grad = (logits - total[..., None]).exp_().mul_((of_silent + of_label)[..., None])
        grad[..., ctx.blank] -= of_silent
        index = functional.pad(targets, (0, 1), value=ctx.blank)[:, None, :, None].expand(-1, logits.shape[1], -1, 1)
        grad.scatter_add_(3, index, -of_label[..., None])
        return grad, None, None, None, None


def _sums(silent: Tensor, label: Tensor) -> Tensor:
    """Compute the logarithms of the sums over all paths to each point of the lattice, from log-probabilities of a blank
    [B, T, U + 1] and of the next token [B, T, U].

    It loops over tokens: over time, the sum of paths is a cumulative sum once the blanks are divided out.
    """
    blanks = functional.pad(silent.cumsum(1), (0, 0, 1, 0))[:, :-1]
    if not has_values(silent):  # the same tensors are held without the loop, which takes seconds there
        return torch.stack((silent + blanks).unbind(2), 2)
    rows = [blanks[:, :, 0]]
    for u in range(label.shape[2]):
        rows.append(torch.logcumsumexp(rows[-1] + label[:, :, u] - blanks[:, :, u + 1], 1) + blanks[:, :, u + 1])
    return torch.stack(rows, 2)


def _sums_back(silent: Tensor, label: Tensor, last: Tensor) -> Tensor:
    """Compute the same for all paths from each point to the end, after the blank at ``last`` [B, T, U + 1]."""
    end = silent.where(last, _NEVER)
    blanks = silent.where(~last, 0.0).flip(1).cumsum(1).flip(1)  # from a frame on
    if not has_values(silent):
        return torch.stack((end + blanks).unbind(2), 2)
    rows: list[Tensor] = []
    for u in range(silent.shape[2] - 1, -1, -1):
        begins = end[:, :, u] if not rows else torch.logaddexp(end[:, :, u], rows[-1] + label[:, :, u])
        rows.append(torch.logcumsumexp((begins - blanks[:, :, u]).flip(1), 1).flip(1) + blanks[:, :, u])
    return torch.stack(rows[::-1], 2)
