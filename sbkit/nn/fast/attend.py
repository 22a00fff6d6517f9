"""Attention for training with dropout on a CPU, where torch has no fused kernel; elsewhere torch's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sbkit.nn.attention_kernel import WHOLE
from sbkit.nn.fast import dropout
from sbkit.nn.fast.autocast import Context, without_autocast


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, scale: float) -> Tensor:
    """Compute softmax(scale q k + bias) v, with dropout ``p`` of the weights: [B, H, T, K] -> [B, H, T, K].

    k, v : [B, H, S, K]
    bias : [B or 1, H or 1, T or 1, S], boolean (True: take part) or added to the scores
    """
    drop = dropout.levels(p, q) if p else 0
    if not drop:
        fused = padded if q.device.type == "cuda" else functional.scaled_dot_product_attention
        return fused(q, k, v, attn_mask=bias, dropout_p=p, scale=scale)
    if bias is not None and bias.dtype == torch.bool:
        never = torch.finfo(v.dtype).min / 2  # finite: no NaN in rows of padding
        bias = torch.zeros(bias.shape, dtype=v.dtype).masked_fill_(~bias, never)
    return _Attend.apply(q, k, v, bias, drop, scale)


def padded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Compute attention with head sizes padded with zeros, as fused kernels on GPUs need them.

    options : for scaled_dot_product_attention; must have ``scale``, whose default depends on the padded size
    """
    size = v.shape[-1]
    if missing := -size % WHOLE:
        q, k, v = (functional.pad(x, (0, missing)) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, **options)[..., :size]


class _Attend(torch.autograd.Function):
    """Attention that keeps its inputs and weights for backward, but no dropout mask and no dropped weights."""

    @staticmethod
    @without_autocast
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drop: int, scale: float) -> Tensor:
        q = q * scale
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores.add_(bias)
        weights = scores.softmax(-1)
        words = dropout.draw(weights.numel())
        kept = dropout.keep(words, drop, weights)
        ctx.save_for_backward(q, k, v, weights)
        ctx.words, ctx.drop, ctx.scale = words, drop, scale
        return (dropout.select(weights, kept) @ v).mul_(dropout.factor(drop))

    @staticmethod
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        grad, kept = grad.contiguous() * dropout.factor(ctx.drop), dropout.keep(ctx.words, ctx.drop, weights)
        of_dropped = grad @ v.transpose(-1, -2)
        of_weights = dropout.select(of_dropped, kept, out=of_dropped)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_v = dropout.select(weights, kept).transpose(-1, -2) @ grad
        of_q, of_k = (of_scores @ k).mul_(ctx.scale), of_scores.transpose(-1, -2) @ q
        return of_q, of_k, of_v, of_scores if ctx.needs_input_grad[3] else None, None, None


class _Heads(torch.autograd.Function):
    """[B, T, H, 3 K] to queries, keys and values [B, H, T, K], the first two rotated by a complex [T, K / 2]."""

    @staticmethod
    def forward(ctx: Context, qkv: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(table)
        b, t, heads, size = *qkv.shape[:3], qkv.shape[3] // 3
        parts = qkv.view(b, t, heads, 3, size).permute(3, 0, 2, 1, 4)
        outputs = tuple(qkv.new_empty(b, heads, t, size) for _ in range(3))
        for part, out in zip(parts[:2], outputs, strict=False):
            _turn(part, table, out)
        outputs[2].copy_(parts[2])
        return outputs

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        b, heads, t, size = grads[0].shape
        out = grads[0].new_empty(b, t, heads, 3, size)
        parts = out.permute(3, 0, 2, 1, 4)
        back = table.conj().resolve_conj()
        for grad, part in zip(grads[:2], parts, strict=False):
            grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # torch's attention may give it transposed
            _turn(grad, back, part)
        parts[2].copy_(grads[2])
        return out.view(b, t, heads, 3 * size), None


def _turn(x: Tensor, table: Tensor, out: Tensor) -> None:
    """Multiply pairs of the last dimension, as complex numbers, by ``table``; writes to ``out``."""
    if x.dtype == torch.float32:
        torch.mul(_complex(x), table, out=_complex(out))
    else:
        out.copy_(torch.view_as_real(_complex(x.float()).mul_(table)).flatten(-2))


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def turned_heads(qkv: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, ...]:
    """Split [B, T, H, 3 K] into queries, keys and values [B, H, T, K], with rotary positions.

    cosines, sines : [T, K] in fp32 in SpeechBrain's layout: each angle twice, with the first sine negated
    """
    return _Heads.apply(qkv, torch.complex(cosines[:, ::2], sines[:, 1::2]))
