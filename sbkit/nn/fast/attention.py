"""SpeechBrain's attention layers with fused kernels, for training, streams and export; no attention maps are returned.

What computes softmax(scale q k + bias) v, from the first row that applies:

==============================================  ======================================================================
when                                            by what
==============================================  ======================================================================
a training step of a Conformer layer on a CPU,  ``fused_attention``, with the projections and the norm before it: these
with compiled kernels that support the layer    layers' forward isn't called (see ``conformer.attention_refusal``)
export                                          products and a softmax written out, for which all runtimes have kernels
dropout on a CPU whose mask sbkit draws         ``_Attend``, which keeps no mask for backward, and draws it in a tenth
(``dropout.levels`` isn't 0)                    of the time
a GPU                                           torch's scaled_dot_product_attention, with padded heads (``padded``)
all else: a CPU without dropout, with a share   torch's scaled_dot_product_attention
near 0 or 1, in float64, or under a compiler
==============================================  ======================================================================
"""

from __future__ import annotations

import math
from typing import Any

import torch
from speechbrain.nnet import attention
from torch import Tensor
from torch.nn import functional

from sbkit.nn.attention_kernel import HEAD_MULTIPLE
from sbkit.nn.fast import dropout
from sbkit.nn.fast.autocast import Context, without_autocast
from sbkit.nn.fast.fused import Layer


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, scale: float) -> Tensor:
    """Compute softmax(scale q k + bias) v, with dropout ``p`` of the weights: [B, H, T, K] -> [B, H, T, K].

    k, v : [B, H, S, K]
    bias : [B or 1, H or 1, T or 1, S], boolean (True: take part) or added to the scores
    """
    drop = dropout.levels(p, q) if p else 0  # 0 on GPUs and under compilers, too
    is_exporting = torch.compiler.is_exporting()
    if not drop and not is_exporting:
        by_torch = padded if q.device.type == "cuda" else functional.scaled_dot_product_attention
        return by_torch(q, k, v, attn_mask=bias, dropout_p=p, scale=scale)
    if bias is not None and bias.dtype == torch.bool:
        never = torch.finfo(v.dtype).min / 2  # finite: no NaN in rows of padding
        bias = torch.zeros_like(bias, dtype=v.dtype).masked_fill(~bias, never)
    if is_exporting:  # runtimes have no kernel for attention that takes every mask and any size
        scores = torch.matmul(q * scale, k.transpose(-1, -2))
        return torch.matmul((scores if bias is None else scores + bias).softmax(-1), v)
    return _Attend.apply(q, k, v, bias, drop, scale)


def padded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Compute attention with head sizes padded with zeros, as fused kernels on GPUs need them.

    options : for scaled_dot_product_attention; must have ``scale``, whose default depends on the padded size
    """
    size = v.shape[-1]
    missing = -size % HEAD_MULTIPLE
    if missing:
        q, k, v = (functional.pad(x, (0, missing)) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, **options)[..., :size]


class _Attend(torch.autograd.Function):
    """Attention that keeps its inputs and weights for backward, but no dropout mask and no dropped weights.

    With A = softmax(scale q k.T + bias), a mask m of 0 and 1, and the factor f of dropout:

        out = f * (m * A) @ v
        d_v = (m * A).T @ (f * d_out)
        d_A = m * ((f * d_out) @ v.T)
        d_S = A * (d_A - sum of the row of d_A * A)       also the gradient of the bias
        d_q = scale * d_S @ k
        d_k = d_S.T @ (scale * q)
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drop: int, scale: float) -> Tensor:
        q = q * scale
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores.add_(bias)
        weights = scores.softmax(-1)
        words = dropout.draw(weights.numel())
        mask = dropout.keep(words, drop, weights)
        ctx.save_for_backward(q, k, v, weights)
        ctx.words, ctx.drop, ctx.scale = words, drop, scale
        return (dropout.select(weights, mask) @ v).mul_(dropout.factor(drop))

    @staticmethod
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        grad = grad.contiguous() * dropout.factor(ctx.drop)
        mask = dropout.keep(ctx.words, ctx.drop, weights)
        of_dropped = grad @ v.transpose(-1, -2)
        of_weights = dropout.select(of_dropped, mask, out=of_dropped)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_v = dropout.select(weights, mask).transpose(-1, -2) @ grad
        of_q = (of_scores @ k).mul_(ctx.scale)
        of_k = of_scores.transpose(-1, -2) @ q
        return of_q, of_k, of_v, of_scores if ctx.needs_input_grad[3] else None, None, None


def _mask(pairs: Tensor | None, keys: Tensor | None, batch: int, dtype: torch.dtype) -> Tensor | None:
    """Combine SpeechBrain's masks (True: ignore) into one for :func:`attend`.

    pairs : [T, S] or [B H, T, S], boolean or added to the scores
    keys : [B, S]
    """
    present = None if keys is None else ~keys.bool()[:, None, None]
    if pairs is None:
        return present
    pairs = pairs.view(batch, -1, *pairs.shape[-2:]) if pairs.ndim == 3 else pairs[None, None]
    if pairs.is_floating_point():
        return pairs.to(dtype) if present is None else pairs.to(dtype).masked_fill(~present, float("-inf"))
    return ~pairs.bool() if present is None else ~pairs.bool() & present


def _itself(layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a layer of SpeechBrain's is called for self-attention, with weights for all three in one matrix."""
    return query is key and key is value and bool(layer._qkv_same_embed_dim)


def relative_shift(scores: Tensor) -> Tensor:
    """Turn scores by distance into scores by key: [B, H, T, 2T-1] -> [B, H, T, T]."""
    t = scores.shape[2]
    if torch.compiler.is_exporting():  # a branch on T would fix it in the graph
        shifted = functional.pad(scores, (1, 0)).flatten(2).unflatten(2, (2 * t, t))[:, :, 1:]
        return shifted.flatten(2).unflatten(2, (t, 2 * t - 1))[..., :t]
    if t == 1:
        return scores
    # Row i starts at column T-1-i. Since each row starts one column before the previous one, rows start 2T-2 apart in
    # the flattened scores, so that this is a view of them.
    flat = scores.flatten(2)[..., t - 1 : t - 1 + t * (2 * t - 2)]
    return flat.unflatten(-1, (t, 2 * t - 2))[..., :t]


class RelPosMHAXL(attention.RelPosMHAXL):
    """Self-attention with relative positions: [B, T, D] -> [B, T, D]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, pos_embs: Tensor, key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None, return_attn_weights: bool = True,
    ) -> tuple[Tensor, None] | Tensor:
        if not _itself(self, query, key, value):
            return super().forward(query, key, value, pos_embs, key_padding_mask, attn_mask, return_attn_weights)
        heads, size = self.num_heads, self.head_dim
        q, k, v = functional.linear(query, self.in_proj_weight).unflatten(-1, (heads, 3 * size)).chunk(3, dim=-1)
        if self.vbias is not None:
            v = (v + self.value_bias_weight.view(heads, size)).to(k.dtype)  # the weight is fp32 under autocast
        positions = self.linear_pos(pos_embs).unflatten(-1, (heads, size))
        with_u = (q + self.pos_bias_u.view(heads, size)).transpose(1, 2).to(v.dtype)
        with_v = (q + self.pos_bias_v.view(heads, size)).transpose(1, 2)
        bias = relative_shift(torch.matmul(with_v * self.scale, positions.permute(0, 2, 3, 1))).to(v.dtype)
        mask = _mask(attn_mask, key_padding_mask, query.shape[0], bias.dtype)
        if mask is not None and mask.dtype == torch.bool:
            bias = bias.masked_fill(~mask, torch.finfo(bias.dtype).min / 2)  # finite: no NaN in rows of padding
        elif mask is not None:
            bias = bias + mask
        out = attend(with_u, k.transpose(1, 2), v.transpose(1, 2), bias, self.dropout if self.training else 0.0,
                     self.scale)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return (out, None) if return_attn_weights else out


def rotary_table(length: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return SpeechBrain's cosines and sines [T, K], each angle twice, with the first sine negated.

    A compiler gets them without SpeechBrain's cache, and fuses them into kernels: the cache would tie a graph to one
    length. Also, tensors cached while CUDA graphs warm up are in the graphs' memory, so the next replay would overwrite
    them.
    """
    if not torch.compiler.is_compiling():
        with torch.inference_mode(False):  # the cache also serves training
            table = attention._get_precomputed_values(length, size, dtype, device)
        return table.cosines[:length], table.sines[:length]
    exact = torch.promote_types(dtype, torch.float32)
    speeds = torch.exp(torch.arange(0, size, 2, dtype=exact, device=device) * -(math.log(10000.0) / size))
    angles = torch.arange(length, dtype=exact, device=device)[:, None] * speeds
    cosines, sines = angles.cos(), angles.sin()
    return (torch.stack([cosines, cosines], -1).flatten(-2).to(dtype),
            torch.stack([-sines, sines], -1).flatten(-2).to(dtype))


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate pairs of the last dimension by angles that broadcast to ``x``."""
    if torch.compiler.is_exporting():
        # Runtimes move one number at a time to swap two; a product with ones and zeros is exact, and ten times as fast.
        pairs = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).unflatten(-1, (-1, 2))
        swapped = torch.matmul(x, pairs.flip(-1).flatten(-2))
    else:
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cosines + swapped * sines


def rotary_attention(mha: Layer, x: Tensor, mask: Tensor | None, table: tuple[Tensor, Tensor] | None = None,
                     before: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Compute self-attention of SpeechBrain's ``RoPEMHA``: [B, T, D] -> [B, T, D]; on a stream, with what came before.

    mask : for :func:`attend`
    table : of all positions, if it is at hand
    before : keys and values [B, left, D] of the frames before ``x``; with them, those of all left + T are returned too.
        Keys aren't rotated, since only relative positions matter
    """
    heads, size = mha.num_heads, mha.head_dim
    left = 0 if before is None else before[0].shape[1]
    qkv = functional.linear(x, mha.in_proj_weight).unflatten(-1, (heads, 3, size))
    cosines, sines = rotary_table(left + x.shape[1], size, qkv.dtype, qkv.device) if table is None else table
    both, v = qkv.split([2, 1], 3)  # whose gradients are joined in one pass
    q, k = _rotated(both, cosines[left:, None, None], sines[left:, None, None]).unbind(3)
    v = v.squeeze(3)
    if mha.vbias is not None:
        v = (v + mha.value_bias_weight.view(heads, size)).to(k.dtype)  # the weight is fp32 under autocast
    window: tuple[Tensor, Tensor] | None = None
    if before is not None:
        keys_before, values_before = before
        keys = torch.cat([keys_before, qkv[..., 1, :].flatten(2)], 1)
        values = torch.cat([values_before, v.flatten(2)], 1)
        window = keys, values
        past = _rotated(keys_before.unflatten(-1, (heads, size)), cosines[:left, None], sines[:left, None])
        k = torch.cat([past, k], 1)
        v = values.unflatten(-1, (heads, size))
    out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, mha.dropout if mha.training else 0.0,
                 mha.scale)
    return mha.out_proj(out.transpose(1, 2).flatten(2)), window


class RoPEMHA(attention.RoPEMHA):
    """Self-attention with rotary positions: [B, T, D] -> [B, T, D]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None, pos_embs: None = None, return_attn_weights: bool = True,
    ) -> tuple[Tensor, None] | Tensor:
        if not _itself(self, query, key, value):
            return super().forward(query, key, value, key_padding_mask, attn_mask, pos_embs, return_attn_weights)
        out = rotary_attention(self, query, _mask(attn_mask, key_padding_mask, query.shape[0], query.dtype))[0]
        return (out, None) if return_attn_weights else out


class MultiheadAttention(attention.MultiheadAttention):
    """torch's multi-head attention in SpeechBrain's wrapper: [B, L, D], [B, S, D] -> [B, L, D]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None, return_attn_weights: bool = True, pos_embs: Tensor | None = None,
    ) -> tuple[Tensor, None] | Tensor:
        att = self.att
        if not att._qkv_same_embed_dim or att.bias_k is not None or att.add_zero_attn or pos_embs is not None:
            return super().forward(query, key, value, attn_mask, key_padding_mask, return_attn_weights, pos_embs)
        b, heads = query.shape[0], att.num_heads
        if query is key and key is value:
            q, k, v = functional.linear(query, att.in_proj_weight, att.in_proj_bias).chunk(3, dim=-1)
        else:
            weights = att.in_proj_weight.chunk(3)
            biases = (None,) * 3 if att.in_proj_bias is None else att.in_proj_bias.chunk(3)
            q, k, v = map(functional.linear, (query, key, value), weights, biases)
        q, k, v = (x.reshape(b, -1, heads, att.head_dim).transpose(1, 2) for x in (q, k, v))
        out = attend(q, k, v, _mask(attn_mask, key_padding_mask, b, q.dtype),
                     att.dropout if self.training else 0.0, att.head_dim**-0.5)
        out = att.out_proj(out.transpose(1, 2).reshape(b, -1, att.embed_dim))
        return (out, None) if return_attn_weights else out
