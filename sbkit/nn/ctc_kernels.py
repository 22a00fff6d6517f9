"""CTC's recursions as two GPU kernels that read lengths on the device, so that training steps need no host sync.

torch's own CUDA kernels take the lengths as Python numbers and copy them to the device with blocking copies, three in
forward and three in backward, so the host waits for the device. Here one program per utterance loops over its frames;
the states of a frame are one block in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sbkit.nn.fast.autocast import Context


@triton.jit
def _logaddexp3(a, b, c):  # type: ignore[no-untyped-def]  # noqa: ANN001  (Triton's, which has other types)
    top = tl.maximum(tl.maximum(a, b), c)
    top = tl.where(top == float("-inf"), 0.0, top)
    return tl.log(tl.exp(a - top) + tl.exp(b - top) + tl.exp(c - top)) + top


@triton.jit(do_not_specialize=["frames_max", "tokens_max"])
def _forward(emit, targets, frames, tokens, alpha, losses, frames_max, tokens_max, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001  (as above)
    """Compute alpha [T, 2U+1] and the negative log-likelihood of one utterance."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(frames + row)
    count = tl.load(tokens + row)
    never = float("-inf")
    s = tl.arange(0, BLOCK)
    odd = s % 2 == 1
    alive = s < 2 * count + 1
    column = tl.where(odd, s // 2 + 1, 0)
    own = tl.load(targets + row * tokens_max + s // 2, mask=alive & odd, other=-1)
    left = tl.load(targets + row * tokens_max + s // 2 - 1, mask=alive & odd & (s > 2), other=-1)
    skips = odd & (s > 2) & (own != left)
    emit += row * frames_max * (tokens_max + 1) + column
    alpha += row * frames_max * (2 * tokens_max + 1) + s

    now = tl.load(emit, mask=alive & (s < 2) & (length > 0), other=never)
    tl.store(alpha, now, mask=alive & (length > 0))
    upcoming = tl.load(emit + (tokens_max + 1), mask=alive & (length > 1), other=never)
    for t in range(1, length):
        current = upcoming  # the next frame is loaded while this one is computed
        upcoming = tl.load(emit + (t + 1) * (tokens_max + 1), mask=alive & (t + 1 < length), other=never)
        one = tl.where(s > 0, tl.gather(now, tl.maximum(s - 1, 0), 0), never)
        two = tl.where(skips, tl.gather(now, tl.maximum(s - 2, 0), 0), never)
        now = tl.where(alive, _logaddexp3(now, one, two) + current, never)
        tl.store(alpha + t * (2 * tokens_max + 1), now, mask=alive)
    ends = tl.where(alive & (s >= 2 * count - 1), now, never)
    top = tl.max(ends, 0)
    top = tl.where(top == never, 0.0, top)
    likelihood = tl.log(tl.sum(tl.where(alive & (s >= 2 * count - 1), tl.exp(ends - top), 0.0), 0)) + top
    likelihood = tl.where(length > 0, likelihood, tl.where(count > 0, never, 0.0))
    tl.store(losses + row, -likelihood)


@triton.jit(do_not_specialize=["frames_max", "tokens_max"])
def _backward(emit, targets, frames, tokens, alpha, losses, outer, grad, frames_max, tokens_max,  # type: ignore[no-untyped-def]  # noqa: ANN001  (as above)
              BLOCK: tl.constexpr):
    """Compute the gradient of emit for one utterance: minus the posterior of each label in each frame."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(frames + row)
    count = tl.load(tokens + row)
    loss = tl.load(losses + row)
    scale = tl.load(outer + row)
    never = float("-inf")
    s = tl.arange(0, BLOCK)
    odd = s % 2 == 1
    alive = s < 2 * count + 1
    column = tl.where(odd, s // 2 + 1, 0)
    own = tl.load(targets + row * tokens_max + s // 2, mask=alive & odd, other=-1)
    right = tl.load(targets + row * tokens_max + s // 2 + 1, mask=odd & (s + 2 < 2 * count + 1), other=-1)
    skips = odd & (s + 2 < 2 * count + 1) & (own != right)
    emit += row * frames_max * (tokens_max + 1) + column
    grad += row * frames_max * (tokens_max + 1)
    alpha += row * frames_max * (2 * tokens_max + 1) + s

    # An utterance without an alignment has no gradient.
    length = tl.where(loss == float("inf"), 0, length)
    beta = tl.where(alive & (s >= 2 * count - 1), 0.0, never)
    for back in range(0, length):
        t = length - 1 - back
        passed = tl.load(alpha + t * (2 * tokens_max + 1), mask=alive, other=never)
        share = tl.where(alive, tl.exp(passed + beta + loss), 0.0) * -scale
        tl.store(grad + t * (tokens_max + 1) + column, share, mask=alive & odd)
        tl.store(grad + t * (tokens_max + 1), tl.sum(tl.where(odd, 0.0, share), 0))
        current = tl.load(emit + t * (tokens_max + 1), mask=alive, other=never)
        after = tl.where(alive, beta + current, never)
        one = tl.where(s < BLOCK - 1, tl.gather(after, tl.minimum(s + 1, BLOCK - 1), 0), never)
        two = tl.where(skips, tl.gather(after, tl.minimum(s + 2, BLOCK - 1), 0), never)
        beta = tl.where(alive, _logaddexp3(after, one, two), never)


def warps(block: int) -> int:
    """Return the number of warps that share the states of a frame."""
    return max(1, min(8, block // 64))


class CTCNegLogLikelihood(torch.autograd.Function):
    """Negative log-likelihood [B] from each frame's log-probabilities of the blank and of the utterance's labels.

    emit: [B, T, 1 + U] fp32 log-probabilities of the blank, then of ``targets``
    targets: [B, U] int64, U at least 1; frames, tokens: [B] int64
    block: a power of two, at least 2 x U + 1
    """

    @staticmethod
    def forward(
        ctx: Context, emit: torch.Tensor, targets: torch.Tensor,
        frames: torch.Tensor, tokens: torch.Tensor, block: int,
    ) -> torch.Tensor:
        emit, targets = emit.contiguous(), targets.contiguous()
        batch, frames_max, width = emit.shape
        alpha = emit.new_empty(batch, frames_max, 2 * width - 1)
        losses = emit.new_empty(batch)
        _forward[(batch,)](emit, targets, frames, tokens, alpha, losses, frames_max, width - 1, BLOCK=block,
                           num_warps=warps(block), num_stages=1)
        ctx.save_for_backward(emit, targets, frames, tokens, alpha, losses)
        ctx.block = block
        return losses

    @staticmethod
    def backward(
        ctx: Context, outer: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        emit, targets, frames, tokens, alpha, losses = ctx.saved_tensors
        batch, frames_max, width = emit.shape
        grad = torch.zeros_like(emit)
        _backward[(batch,)](emit, targets, frames, tokens, alpha, losses, outer.contiguous(), grad,
                            frames_max, width - 1, BLOCK=ctx.block, num_warps=warps(ctx.block),
                            num_stages=1)
        return grad, None, None, None, None
