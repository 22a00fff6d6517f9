"""SpeechBrain's attention layers with fused kernels; attention maps are not returned."""

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
    if missing := -size % HEAD_MULTIPLE:
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


def split_rotary_heads(qkv: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, ...]:
    """Split [B, T, H, 3 K] into queries, keys and values [B, H, T, K], with rotary positions.

    cosines, sines : [T, K] in fp32 in SpeechBrain's layout: each angle twice, with the first sine negated
    """
    return _Heads.apply(qkv, torch.complex(cosines[:, ::2], sines[:, 1::2]))


def relative_shift(scores: Tensor) -> Tensor:
    """Turn scores by distance into scores by key, as a view: [B, H, T, 2T-1] -> [B, H, T, T].

    Row i of the result starts at column T-1-i. Since each row starts one column before the previous one, rows start
    2T-2 apart in the flattened scores.
    """
    t = scores.shape[2]
    if t == 1:
        return scores
    flat = scores.flatten(2)[..., t - 1 : t - 1 + t * (2 * t - 2)]
    return flat.unflatten(-1, (t, 2 * t - 2))[..., :t]


def _key_mask(key_padding_mask: Tensor | None) -> Tensor | None:
    """Turn SpeechBrain's mask (True: ignore) into one for scaled_dot_product_attention (True: take part)."""
    return None if key_padding_mask is None else ~key_padding_mask.bool()[:, None, None, :]


def _pair_mask(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Combine SpeechBrain's mask of keys [B, S] with one of pairs [T, S]: [B or 1, 1, T or 1, S], True: take part."""
    keys = _key_mask(key_padding_mask)
    if attn_mask is None:
        return keys
    pairs = ~attn_mask[None, None]
    return pairs if keys is None else keys & pairs


def _pairs(attn_mask: Tensor | None) -> bool:
    """Whether a mask is None or one that ``_pair_mask`` takes."""
    return attn_mask is None or (attn_mask.dtype == torch.bool and attn_mask.dim() == 2)


class RelPosMHAXL(attention.RelPosMHAXL):
    """Self-attention with relative positions: [B, T, D] -> [B, T, D]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, pos_embs: Tensor, key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None, return_attn_weights: bool = True,
    ) -> tuple[Tensor, None] | Tensor:
        itself = query is key and key is value and self._qkv_same_embed_dim
        if not itself or not _pairs(attn_mask) or self.mask_pos_future:
            return super().forward(query, key, value, pos_embs, key_padding_mask, attn_mask, return_attn_weights)
        b, t, heads, size = *query.shape[:2], self.num_heads, self.head_dim
        q, k, v = functional.linear(query, self.in_proj_weight).view(b, t, heads, 3 * size).chunk(3, dim=-1)
        if self.vbias is not None:
            v = (v + self.value_bias_weight.view(1, 1, heads, size)).to(k.dtype)  # the weight is fp32 under autocast
        positions = self.linear_pos(pos_embs).view(1, -1, heads, size)
        with_u = (q + self.pos_bias_u.view(1, 1, heads, size)).transpose(1, 2)
        with_v = (q + self.pos_bias_v.view(1, 1, heads, size)).transpose(1, 2)
        bias = relative_shift(torch.matmul(with_v * self.scale, positions.permute(0, 2, 3, 1)))
        with_u, bias = with_u.to(v.dtype), bias.to(v.dtype)
        pairs = _pair_mask(key_padding_mask, attn_mask)
        if pairs is not None:
            bias = bias.masked_fill(~pairs, torch.finfo(bias.dtype).min / 2)  # finite: no NaN in rows of padding
        out = attend(with_u, k.transpose(1, 2), v.transpose(1, 2), bias, self.dropout if self.training else 0.0,
                     self.scale)
        out = self.out_proj(out.transpose(1, 2).reshape(b, t, heads * size))
        return (out, None) if return_attn_weights else out


def rotary_table(length: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute SpeechBrain's cosines and sines [T, K] without its cache, for compilers, which fuse this into kernels.

    The cache would tie a compiled graph to one length. Also, tensors cached while CUDA graphs warm up are in the
    graphs' memory, so the next replay would overwrite them.
    """
    exact = torch.promote_types(dtype, torch.float32)
    speeds = torch.exp(torch.arange(0, size, 2, dtype=exact, device=device) * -(math.log(10000.0) / size))
    angles = torch.arange(length, dtype=exact, device=device)[:, None] * speeds
    cosines, sines = angles.cos(), angles.sin()
    return (torch.stack([cosines, cosines], -1).flatten(-2).to(dtype),
            torch.stack([-sines, sines], -1).flatten(-2).to(dtype))


class RoPEMHA(attention.RoPEMHA):
    """Self-attention with rotary positions: [B, T, D] -> [B, T, D]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None, pos_embs: None = None, return_attn_weights: bool = True,
    ) -> tuple[Tensor, None] | Tensor:
        itself = query is key and key is value and self._qkv_same_embed_dim
        if not itself or not _pairs(attn_mask):
            return super().forward(query, key, value, key_padding_mask, attn_mask, pos_embs, return_attn_weights)
        b, t, heads, size = *query.shape[:2], self.num_heads, self.head_dim
        qkv = functional.linear(query, self.in_proj_weight).view(b, t, heads, 3 * size)
        turn = self._turned if qkv.device.type == "cpu" and not torch.compiler.is_compiling() else self._rotated
        q, k, v = turn(qkv)
        if self.vbias is not None:
            v = (v + self.value_bias_weight.view(1, heads, 1, size)).to(k.dtype)
        pairs = _pair_mask(key_padding_mask, attn_mask)
        out = attend(q, k, v, pairs, self.dropout if self.training else 0.0, self.scale)
        out = self.out_proj(out.transpose(1, 2).reshape(b, t, heads * size))
        return (out, None) if return_attn_weights else out

    @staticmethod
    def _turned(qkv: Tensor) -> tuple[Tensor, ...]:
        """Split and rotate in one pass, with complex numbers, into the layout that matrix products need."""
        t, size = qkv.shape[1], qkv.shape[3] // 3
        table = attention._get_precomputed_values(t, size, torch.float32, qkv.device)
        return split_rotary_heads(qkv, table.cosines[:t], table.sines[:t])

    def _rotated(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Split and rotate with operations that compilers support."""
        size = qkv.shape[3] // 3
        qk, v = qkv[..., : 2 * size].unflatten(-1, (2, size)), qkv[..., 2 * size :]
        q, k = self._rotate(qk).unbind(3)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    def _rotate(x: Tensor) -> Tensor:
        """Rotate pairs of the last dimension by their position: [B, T, H, 2, size]."""
        if torch.compiler.is_dynamo_compiling():
            cosines, sines = rotary_table(x.shape[1], x.shape[-1], x.dtype, x.device)
            cosines, sines = cosines[:, None, None], sines[:, None, None]
        else:
            table = attention._get_precomputed_values(x.shape[1], x.shape[-1], x.dtype, x.device)
            cosines, sines = table.cosines[: x.shape[1], None, None], table.sines[: x.shape[1], None, None]
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return x * cosines + swapped * sines


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
        out = attend(q, k, v, self._mask(attn_mask, key_padding_mask, b, q.dtype),
                     att.dropout if self.training else 0.0, att.head_dim**-0.5)
        out = att.out_proj(out.transpose(1, 2).reshape(b, -1, att.embed_dim))
        return (out, None) if return_attn_weights else out

    def _mask(self, attn: Tensor | None, keys: Tensor | None, b: int, dtype: torch.dtype) -> Tensor | None:
        """Combine SpeechBrain's two masks into one: boolean (True: take part) or added to the scores."""
        if attn is not None:
            attn = attn.view(b, -1, *attn.shape[-2:]) if attn.ndim == 3 else attn[None, None]
            attn = attn.to(dtype) if attn.is_floating_point() else ~attn.bool()
        present = _key_mask(keys)
        if present is None or attn is None:
            return attn if present is None else present
        if attn.dtype == torch.bool:
            return attn & present
        return attn.masked_fill(~present, float("-inf"))
