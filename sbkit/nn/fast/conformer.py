"""SpeechBrain's Conformer layer, its convolution module and its feed-forward layer in fewer passes over memory."""

from __future__ import annotations

import torch
from speechbrain.lobes.models.transformer import Conformer
from speechbrain.nnet import activations, attention, normalization
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.fast import dropout, fused
from sbkit.nn.fast.attention import RelPosMHAXL, RoPEMHA
from sbkit.nn.fast.dropout import Dropout
from sbkit.nn.fast.fused import Layer
from sbkit.nn.native.library import WIDEST


def convolve(module: Layer, x: Tensor, mask: Tensor | None = None, chunk: int | None = None,
             before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute SpeechBrain's ``ConvolutionModule``, and the inputs of its depthwise convolution: [B, T, D] -> [B, T, D].

    mask : [B, T, 1], True for padding
    chunk : frames of a chunk, which see nothing beyond its end, as on a stream; None: the whole utterance
    before : on a stream, the inputs [B, D, around] of the frames before, which are returned in front of this chunk's
    """
    pointwise, conv, around = module.bottleneck[0], module.conv, module.padding
    x = functional.linear(module.layer_norm(x), pointwise.weight.squeeze(-1), pointwise.bias)
    x = functional.glu(x, dim=-1)
    if mask is not None:
        x = x.masked_fill(mask, 0.0)
    (b, t, columns), inputs = x.shape, x.transpose(1, 2)
    if before is not None:
        inputs = torch.cat([before, inputs], 2)
        out = functional.conv1d(functional.pad(inputs, (0, around)), conv.weight, conv.bias, groups=conv.groups)
    elif chunk is not None:
        assert not module.causal and module.dilation == 1, "SpeechBrain's chunks need a centred convolution"
        # A compiled graph always pads, since one without padding would be another graph.
        rest = chunk - t % chunk if torch.compiler.is_compiling() else -t % chunk
        pieces = functional.pad(x, (0, 0, around, rest)).unfold(1, around + chunk, chunk)  # [B, N, D, around + chunk]
        out = functional.conv1d(functional.pad(pieces, (0, around)).flatten(0, 1), conv.weight, conv.bias,
                                groups=conv.groups)
        out = out.transpose(1, 2).reshape(b, t + rest, columns)[:, :t].transpose(1, 2)
    elif x.device.type == "cpu" and not torch.compiler.is_compiling():
        # oneDNN's depthwise kernels for images with channels last take a third of the time.
        out = functional.conv2d(inputs[..., None], conv.weight[..., None], conv.bias, 1, (*conv.padding, 0),
                                (*conv.dilation, 1), conv.groups)[..., 0]
    else:
        out = conv(inputs)
    out = module.after_conv((out[..., : -around] if module.causal else out).transpose(1, 2))
    return (out if mask is None else out.masked_fill(mask, 0.0)), inputs


class ConvolutionModule(Conformer.ConvolutionModule):
    """``ConvolutionModule``: [B, T, D] to [B, T, D]; sets padding to zero before the depthwise convolution.

    The original does so only after it, so that padding leaks into the last frames of a batch's shorter utterances.
    Here the outputs of an utterance in a batch equal the original's for that utterance alone.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None,
                dynchunktrain_config: DynChunkTrainConfig | None = None) -> Tensor:
        return convolve(self, x, mask, dynchunktrain_config and dynchunktrain_config.chunk_size)[0]


class ConformerEncoderLayer(Conformer.ConformerEncoderLayer):
    """``ConformerEncoderLayer``: [B, T, D] to [B, T, D]; with fused kernels for training on a CPU."""

    def forward(
        self, x: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        pos_embs: Tensor | None = None, dynchunktrain_config: DynChunkTrainConfig | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        mask = None if src_key_padding_mask is None else src_key_padding_mask.unsqueeze(-1)
        dtype, given = fused.precision(x), x.dtype
        x = x if dtype is None else x.float()  # residuals are summed in float32
        x = _feed_forward(self.ffn_module1, x, dtype)
        x, weights = _attend(self, x, src_mask, src_key_padding_mask, pos_embs, dtype)
        x = _convolution(self.convolution_module, x, mask, dynchunktrain_config, dtype)
        return _norm(self.norm2, _feed_forward(self.ffn_module2, x, dtype), dtype and given), weights


def _norm(module: Layer, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Apply a layer norm, with outputs in ``dtype`` if the fused norm can be used."""
    if dtype is None or type(module) is not normalization.LayerNorm or not fused.plain(module, module.norm):
        return module(x)
    return fused.norm(x, module.norm, dtype) if fused.fits(module.norm, x.shape[-1:]) else module(x)


def _feed_forward(module: Layer, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Compute x plus half the output of a feed-forward module, fused if possible."""
    parts = None if dtype is None else _parts(module, nn.LayerNorm, _FEED_FORWARDS, _DROPOUTS)
    layers = _parts(parts[1].ffn, nn.Linear, _SILUS, _DROPOUTS, nn.Linear) if parts and fused.plain(parts[1]) else None
    columns = x.shape[-1:]
    if (dtype is not None and parts and layers and fused.fits(parts[0], columns)
            and _biased(len(layers[0].weight), layers[0]) and _biased(columns[0], layers[3])):
        inner, outer = dropout.share(layers[2]), dropout.share(parts[2])
        if inner is not None and outer is not None:
            return fused.feed_forward(x, parts[0], layers[0], layers[3], inner, outer, 0.5, dtype)
    return torch.add(x, module(x), alpha=0.5)


def _attend(layer: Layer, x: Tensor, mask: Tensor | None, keys: Tensor | None, positions: Tensor | None,
            dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Compute x plus self-attention of its norm, fused if possible; returns the attention weights too, or None."""
    if dtype is not None and _supported(layer.mha_layer, layer.norm1, x, keys, mask):
        summed = _self_attention(layer.mha_layer, layer.norm1.norm, x, keys, mask, positions, dtype)
        if summed is not None:
            return summed, None
    normed = _norm(layer.norm1, x, dtype)
    attended, weights = layer.mha_layer(normed, normed, normed, attn_mask=mask, key_padding_mask=keys,
                                        pos_embs=positions)
    return attended + x, weights


def _supported(mha: Layer, norm: Layer, x: Tensor, keys: Tensor | None, mask: Tensor | None) -> bool:
    """Whether the kernels support this attention layer and its norm."""
    if type(mha) not in (RoPEMHA, RelPosMHAXL) or type(norm) is not normalization.LayerNorm:
        return False
    p = mha.dropout if mha.training else 0.0
    return bool(mha._qkv_same_embed_dim and mha.vbias is None and x.shape[1] <= WIDEST
                and fused.plain(mha, mha.out_proj, norm, norm.norm) and type(mha.out_proj) is nn.Linear
                and fused.fits(norm.norm, x.shape[-1:]) and fused.masks(keys, x.shape[:2])
                and fused.masks(mask, (x.shape[1], x.shape[1]))
                and _biased(x.shape[-1], mha.out_proj) and fused.single(mha.in_proj_weight)
                and mha.in_proj_weight.shape == (3 * x.shape[-1], x.shape[-1])
                and (not p or dropout.levels(p)))


def _self_attention(mha: Layer, norm: nn.LayerNorm, x: Tensor, keys: Tensor | None, mask: Tensor | None,
                    positions: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Compute x plus fused self-attention of its norm; None if the kernels don't support its positions."""
    t, size, p = x.shape[1], mha.head_dim, mha.dropout if mha.training else 0.0
    if type(mha) is RoPEMHA:
        if size % 2:
            return None
        angles = attention._get_precomputed_values(t, size, torch.float32, x.device)
        table = angles.cosines[:t].contiguous(), angles.sines[:t].contiguous()
        return fused.attention(x, keys, mask, norm, mha, p, dtype, table)
    biases = mha.pos_bias_u, mha.pos_bias_v
    if not fused.single(*biases) or any(bias.numel() != x.shape[-1] for bias in biases) or mha.mask_pos_future:
        return None
    if type(positions) is not Tensor or positions.shape[:-1] != (1, 2 * t - 1):
        return None
    places = mha.linear_pos(positions)
    if type(places) is not Tensor or places.shape[1:] != (2 * t - 1, x.shape[-1]) or places.device != x.device \
            or places.dtype not in (torch.float32, dtype):
        return None
    near, far = (bias.flatten() for bias in biases)
    return fused.attention(x, keys, mask, norm, mha, p, dtype, None, near, far, places[0])


def _convolution(module: Layer, x: Tensor, mask: Tensor | None, chunks: DynChunkTrainConfig | None,
                 dtype: torch.dtype | None) -> Tensor:
    """Compute x plus the output of a convolution module, fused if possible."""
    if dtype is not None and type(module) is ConvolutionModule and fused.plain(module):
        first = _parts(module.bottleneck, nn.Conv1d, nn.GLU)
        behind = _parts(module.after_conv, nn.LayerNorm, _SILUS, nn.Linear, _DROPOUTS)
        around, columns = module.conv, x.shape[-1:]
        if (first and behind and not module.causal and fused.plain(around, module.layer_norm)
                and fused.fits(module.layer_norm, columns) and fused.fits(behind[0], columns)
                and _convolves(first[0], 1) and first[0].kernel_size == (1,) and _convolves(around, columns[0])
                and fused.masks(mask, (*x.shape[:2], 1)) and _biased(2 * columns[0], first[0])
                and _biased(columns[0], around, behind[2])):
            p = dropout.share(behind[3])
            if p is not None:
                return fused.convolution(x, mask, module.layer_norm, first[0], around, behind[0], behind[2], p, dtype,
                                         chunks and chunks.chunk_size)
    return x + module(x, mask, dynchunktrain_config=chunks)


def _convolves(layer: nn.Module, groups: int) -> bool:
    """Whether a layer is a plain convolution that is centred and keeps the number of frames."""
    return (type(layer) is nn.Conv1d and layer.groups == groups and layer.kernel_size[0] % 2 == 1
            and layer.padding == (layer.kernel_size[0] // 2,) and layer.padding_mode == "zeros"
            and layer.stride == layer.dilation == (1,))


_DROPOUTS = (nn.Dropout, Dropout)
_SILUS = (nn.SiLU, activations.Swish)


def _parts(module: nn.Module, *kinds: type | tuple[type, ...]) -> list[Layer] | None:
    """Return the layers of a plain Sequential if they have exactly these classes and no hooks, otherwise None."""
    if type(module) is not nn.Sequential or len(module) != len(kinds):
        return None
    layers = list(module)
    for part, kind in zip(layers, kinds, strict=True):
        if type(part) not in (kind if isinstance(kind, tuple) else (kind,)):
            return None
        if type(part) is activations.Swish and part.beta != 1:
            return None
    return layers if fused.plain(module, *layers) else None


def _biased(columns: int, *layers: Layer) -> bool:
    """Whether all layers have a bias, plain parameters and ``columns`` outputs."""
    return all(layer.bias is not None and fused.single(layer.weight, layer.bias) and len(layer.weight) == columns
               for layer in layers)


class PositionalwiseFeedForward(attention.PositionalwiseFeedForward):
    """``PositionalwiseFeedForward``: [B, T, D] to [B, T, D], without the original's permutation to [T, B, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x)


_FEED_FORWARDS = (attention.PositionalwiseFeedForward, PositionalwiseFeedForward)
