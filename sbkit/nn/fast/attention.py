"""SpeechBrain's attention layers with fused kernels; attention maps are not returned."""

from __future__ import annotations

import math

import torch
from speechbrain.nnet import attention
from torch import Tensor
from torch.nn import functional

from sbkit.nn.fast.attend import attend, turned_heads


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

    The cache would tie a compiled graph to one length. And tensors that are cached while CUDA graphs warm up lie in the
    graphs' memory, so the next replay overwrites them.
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
        return turned_heads(qkv, table.cosines[:t], table.sines[:t])

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
