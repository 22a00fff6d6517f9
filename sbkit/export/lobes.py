"""Equivalents of SpeechBrain's layers that can be exported: sizes stay symbolic, nothing is kept between calls.

The originals can't be exported because ``len(tensor)`` fixes the batch size, tables that are cached or have a fixed
length fix the time, Python loops over frames are unrolled, and branches depend on values. Parameters and checkpoint
keys are the same: only classes are swapped, as in ``sbkit.nn.accelerate``. A user's subclass is left as it is.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from speechbrain.lobes.models.transformer import Transformer
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.nnet import attention
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.export import recurrent
from sbkit.nn.accelerate import FASTER, accelerate
from sbkit.nn.fast.attention import MultiheadAttention as FastMultiheadAttention
from sbkit.nn.lengths import lengths_to_mask


def exportable(module: nn.Module) -> Counter[str]:
    """Swap the class of each layer that has an equivalent for export; returns how many of each class were swapped."""
    accelerate(module)
    found: Counter[str] = Counter()
    for layer in module.modules():
        if type(layer) in EQUIVALENTS:
            found[type(layer).__name__] += 1
            layer.__class__ = EQUIVALENTS[type(layer)]
    return found


class ExportedTransformerASR(TransformerASR):
    """``TransformerASR`` with masks computed from shapes alone."""

    def encode(self, src: Tensor, wav_len: Tensor | None = None, pad_idx: int = 0,
               dynchunktrain_config: DynChunkTrainConfig | None = None) -> Tensor:
        """[B, T, F] and relative lengths [B] to [B, T, D]."""
        if dynchunktrain_config is not None:
            raise SbkitError("an encoder that attends in chunks (dynchunktrain_config) can't be exported",
                             hint="leave it out: the exported model attends to whole recordings")
        src = src.flatten(2)
        size = src.shape[1]
        padding = None if wav_len is None else ~lengths_to_mask(torch.round(wav_len * size), size)
        future = None
        if self.causal:
            time = torch.arange(size, device=src.device)
            future = time[None, :] > time[:, None]
        src = self.custom_src_module(src)
        positions = None
        if self.attention_type == "RelPosMHAXL":
            positions = self.positional_encoding(src)
        elif self.attention_type not in ("hypermixing", "RoPEMHA") and self.positional_encoding_type is not None:
            src = src + self.positional_encoding(src)
        return self.encoder(src=src, src_mask=future, src_key_padding_mask=padding, pos_embs=positions)[0]


def _interleaved_waves(positions: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Compute sines in even columns and cosines in odd ones: [T] -> [T, size]."""
    rates = torch.exp(torch.arange(0, size, 2, device=positions.device).float() * -(math.log(10000.0) / size))
    angles = positions.float()[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(dtype)


class ExportedPositionalEncoding(Transformer.PositionalEncoding):
    """Sinusoids computed for each length, where the original slices a table of ``max_len``."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [1, T, D]."""
        time = torch.arange(x.shape[1], device=x.device)
        return _interleaved_waves(time, self.pe.shape[-1], self.pe.dtype)[None]


class ExportedRelPosEncXL(attention.RelPosEncXL):
    """Sinusoids for distances from T-1 to -(T-1)."""

    def make_pe(self, seq_len: int) -> Tensor:
        """T -> [1, 2T-1, D]; as in the original, sines ignore the sign of the distance."""
        distance = torch.arange(2 * seq_len - 1, device=self.inv_freq.device) - (seq_len - 1)
        return _interleaved_waves(distance.abs(), self.emb_dim, self.emb_dtype)[None]


def _shifted(scores: Tensor) -> Tensor:
    """Turn scores by distance into scores by key, for any T: [B, H, T, 2T-1] -> [B, H, T, T]."""
    size = scores.shape[2]
    padded = functional.pad(scores, (1, 0)).flatten(2).unflatten(2, (2 * size, size))
    return padded[:, :, 1:].flatten(2).unflatten(2, (size, 2 * size - 1))[..., :size]


def _mask(keys: Tensor | None, pairs: Tensor | None) -> Tensor | None:
    """Combine SpeechBrain's two masks (True: ignore) into one for scores [B, H, T, T]."""
    masks = [each for each in (None if keys is None else keys[:, None, None], pairs) if each is not None]
    return masks[0] | masks[1] if len(masks) == 2 else masks[0] if masks else None


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None,
            ignore: Tensor | None) -> Tensor:
    """Compute softmax attention of [B, T, H, D] tensors: [B, T, H * D]."""
    scores = torch.matmul(query.transpose(1, 2) * scale, key.permute(0, 2, 3, 1))
    scores = scores if bias is None else scores + bias
    if ignore is not None:
        scores = scores.masked_fill(ignore, torch.finfo(scores.dtype).min / 2)  # finite: no NaN in rows of padding
    out = torch.matmul(scores.softmax(-1), value.transpose(1, 2))
    return out.transpose(1, 2).flatten(2)


class ExportedRelPosMHAXL(attention.RelPosMHAXL):
    """Self-attention with relative positions: [B, T, D] -> [B, T, D]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, pos_embs: Tensor, key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None, return_attn_weights: bool = True,
    ) -> tuple[Tensor, None] | Tensor:
        heads, size = self.num_heads, self.head_dim
        q, k, v = functional.linear(query, self.in_proj_weight).unflatten(-1, (heads, 3 * size)).chunk(3, dim=-1)
        if self.vbias is not None:
            v = v + self.value_bias_weight.view(heads, size)
        positions = self.linear_pos(pos_embs).unflatten(-1, (heads, size))  # [1, 2T-1, H, size]
        with_v = (q + self.pos_bias_v.view(heads, size)).transpose(1, 2) * self.scale
        bias = _shifted(torch.matmul(with_v, positions.permute(0, 2, 3, 1)))
        out = self.out_proj(_attend(
            q + self.pos_bias_u.view(heads, size), k, v, self.scale, bias, _mask(key_padding_mask, attn_mask)))
        return (out, None) if return_attn_weights else out


class ExportedRoPEMHA(attention.RoPEMHA):
    """Self-attention with rotary positions, whose angles are computed for each length: [B, T, D] -> [B, T, D]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None, pos_embs: None = None, return_attn_weights: bool = True,
    ) -> tuple[Tensor, None] | Tensor:
        heads, size = self.num_heads, self.head_dim
        q, k, v = functional.linear(query, self.in_proj_weight).unflatten(-1, (heads, 3 * size)).chunk(3, dim=-1)
        if self.vbias is not None:
            v = v + self.value_bias_weight.view(heads, size)
        time = torch.arange(query.shape[1], device=query.device)
        waves = _interleaved_waves(time, size, query.dtype).unflatten(-1, (size // 2, 2))
        sines, cosines = waves[:, None, :, 0], waves[:, None, :, 1]  # [T, 1, size / 2]
        q, k = _rotated(q, sines, cosines), _rotated(k, sines, cosines)
        out = self.out_proj(_attend(q, k, v, self.scale, None, _mask(key_padding_mask, attn_mask)))
        return (out, None) if return_attn_weights else out


def _rotated(x: Tensor, sines: Tensor, cosines: Tensor) -> Tensor:
    """Rotate each pair of adjacent columns by its angle: [B, T, H, size]."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1).flatten(-2)


class ExportedMultiheadAttention(FastMultiheadAttention):
    """``MultiheadAttention`` as self-attention: [B, T, D] -> [B, T, D]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None, return_attn_weights: bool = True, pos_embs: Tensor | None = None,
    ) -> tuple[Tensor, None] | Tensor:
        att = self.att
        plain = att._qkv_same_embed_dim and att.bias_k is None and not att.add_zero_attn and pos_embs is None
        if not plain or query is not key or key is not value:
            return super().forward(query, key, value, attn_mask, key_padding_mask, return_attn_weights, pos_embs)
        heads, size = att.num_heads, att.head_dim
        q, k, v = (x.unflatten(-1, (heads, size))
                   for x in functional.linear(query, att.in_proj_weight, att.in_proj_bias).chunk(3, dim=-1))
        out = att.out_proj(_attend(q, k, v, size ** -0.5, None, _mask(key_padding_mask, attn_mask)))
        return (out, None) if return_attn_weights else out


_BY_ORIGINAL: dict[type, type] = {
    TransformerASR: ExportedTransformerASR,
    Transformer.PositionalEncoding: ExportedPositionalEncoding,
    attention.RelPosEncXL: ExportedRelPosEncXL,
    attention.RelPosMHAXL: ExportedRelPosMHAXL,
    attention.RoPEMHA: ExportedRoPEMHA,
    attention.MultiheadAttention: ExportedMultiheadAttention,
    **recurrent.EQUIVALENTS,
}
#: Keys are the fast equivalents where there are any, since ``exportable`` accelerates first.
EQUIVALENTS = {FASTER.get(original, original): swapped for original, swapped in _BY_ORIGINAL.items()}
