"""SpeechBrain's Conformer layer, its convolution module and its feed-forward layer in fewer passes over memory."""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
from speechbrain.lobes.models.transformer import Conformer
from speechbrain.nnet import activations, attention, normalization
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.fast import dropout, fused
from sbkit.nn.fast.attention import RelPosMHAXL, RoPEMHA, rotary_table
from sbkit.nn.fast.dropout import Dropout
from sbkit.nn.fast.fused import Layer
from sbkit.nn.fast.fused_attention import RelativePositions, RotaryPositions
from sbkit.nn.fast.fused_attention import attention as self_attention
from sbkit.nn.fast.fused_convolution import convolution
from sbkit.nn.fast.fused_feed_forward import feed_forward
from sbkit.nn.fast.norm import LayerNorm
from sbkit.nn.guard import has_values
from sbkit.nn.native import trial
from sbkit.nn.native.library import WIDEST

logger = logging.getLogger(__name__)


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
        x = torch.where(mask, 0.0, x)  # one kernel; masked_fill copies first
    b, t, columns = x.shape
    inputs = x.transpose(1, 2)
    if before is not None:
        inputs = torch.cat([before, inputs], 2)
        out = functional.conv1d(functional.pad(inputs, (0, around)), conv.weight, conv.bias, groups=conv.groups)
    elif own_depthwise(module, x):
        from sbkit.nn.fast.depthwise import Depthwise  # needs Triton

        out = Depthwise.apply(x, conv.weight, conv.bias, around, chunk or t).transpose(1, 2)
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
    out = module.after_conv((out[..., :t] if module.causal else out).transpose(1, 2))
    return (out if mask is None else torch.where(mask, 0.0, out)), inputs


def own_depthwise(module: Layer, x: Tensor) -> bool:
    """Whether sbkit's kernels convolve ``x`` on a GPU."""
    conv = module.conv
    return bool(x.device.type == "cuda" and not torch.compiler.is_compiling() and has_values(x) and x.numel()
                and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and type(conv) is nn.Conv1d
                and type(conv.weight) is type(conv.bias) is nn.Parameter and not conv._forward_hooks
                and not conv._forward_pre_hooks and module.dilation == 1 and conv.groups == x.shape[2]
                and (conv.kernel_size[0] % 2 or module.causal) and depthwise_works(x.device))


@functools.cache
def depthwise_works(device: torch.device) -> bool:
    """Whether the kernels of the depthwise convolution compile on a device and agree there with torch on the CPU."""
    def compare() -> bool:
        from sbkit.nn.fast import depthwise  # needs Triton

        ours = depthwise.example(depthwise.Depthwise.apply, device, torch.float32)
        return trial.results_agree(ours, depthwise.example(depthwise.by_torch, "cpu", torch.float64), [1e-4] * 4)

    return trial.kernels_agree(device, compare, "depthwise convolution")


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
        input_dtype = x.dtype
        dtype = fused.precision(x)
        if dtype is not None:
            x = x.float()  # residuals are summed in float32
        x = _feed_forward(self.ffn_module1, x, dtype)
        x, weights = _attend(self, x, src_mask, src_key_padding_mask, pos_embs, dtype)
        x = _convolution(self.convolution_module, x, mask, dynchunktrain_config, dtype)
        x = _feed_forward(self.ffn_module2, x, dtype)
        return _norm(self.norm2, x, None if dtype is None else input_dtype), weights


# Each part of a layer is computed by kernels, or by the module itself if a refusal says why kernels can't. In all of
# them ``dtype`` is what ``fused.precision`` returned: None if this is no training step on a CPU with kernels.


def _norm(module: Layer, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Apply a layer norm, with outputs in ``dtype`` if the fused norm can be used."""
    fast = (dtype is not None and type(module) is normalization.LayerNorm and fused.known(module)
            and fused.fits(module.norm, x.shape[-1:]))
    return fused.norm(x, module.norm, dtype) if fast and dtype is not None else module(x)


@functools.cache
def _log_refusal(part: str, reason: str) -> None:
    """Log why a part of a layer is computed by torch; once for each reason, since it holds in all layers and steps."""
    logger.info("sbkit's compiled kernels don't compute the %s of a Conformer layer, torch does: %s", part, reason)


# ------------------------------------------------------------ feed-forward


class _FeedForwardLayers(NamedTuple):
    """The layers of a Conformer's feed-forward module that compute something, and all that are called."""

    norm: Layer
    first: Layer
    inner_dropout: Layer
    second: Layer
    outer_dropout: Layer
    called: tuple[Layer, ...]


def _feed_forward(module: Layer, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Compute x plus half the output of a feed-forward module, fused if possible."""
    if dtype is not None:
        layers = _feed_forward_layers(module)
        reason = _OTHER_LAYERS if layers is None else feed_forward_refusal(layers, x)
        if layers is not None and reason is None:
            return feed_forward(
                x,
                norm=layers.norm,
                first=layers.first,
                second=layers.second,
                inner_dropout=dropout.share(layers.inner_dropout) or 0.0,
                outer_dropout=dropout.share(layers.outer_dropout) or 0.0,
                weight=0.5,
                dtype=dtype,
            )
        _log_refusal("feed-forward module", str(reason))
    return torch.add(x, module(x), alpha=0.5)


def _feed_forward_layers(module: Layer) -> _FeedForwardLayers | None:
    """Return the layers of a feed-forward module; None if they are of other classes than SpeechBrain's and sbkit's."""
    outside = _layers(module, _NORMS, _FEED_FORWARDS, _DROPOUTS)
    if outside is None:
        return None
    norm, inner, outer_dropout = outside
    inside = _layers(inner.ffn, _LINEAR, _SILUS, _DROPOUTS, _LINEAR)
    if inside is None:
        return None
    first, _, inner_dropout, second = inside
    return _FeedForwardLayers(norm=norm, first=first, inner_dropout=inner_dropout, second=second,
                              outer_dropout=outer_dropout, called=(module, *outside, inner.ffn, *inside))


def feed_forward_refusal(layers: _FeedForwardLayers, x: Tensor) -> str | None:
    """Return why kernels can't compute a feed-forward module of x; None if they can."""
    columns = x.shape[-1]
    if not fused.known(*layers.called):
        return _CHANGED
    if not fused.fits(layers.norm, x.shape[-1:]):
        return _OTHER_NORM
    if dropout.share(layers.inner_dropout) is None or dropout.share(layers.outer_dropout) is None:
        return _OTHER_DROPOUT
    if layers.first.bias.shape != layers.first.weight.shape[:1]:
        return "the first linear layer's bias doesn't fit its weight"
    if not _gives(columns, layers.second):
        return f"the second linear layer doesn't return {columns} features"
    return None


# ------------------------------------------------------------ attention


def _attend(layer: Layer, x: Tensor, mask: Tensor | None, keys: Tensor | None, positions: Tensor | None,
            dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Compute x plus self-attention of its norm, fused if possible; returns the attention weights too, or None."""
    if dtype is not None:
        summed = _fused_attention(layer.mha_layer, layer.norm1, x, mask, keys, positions, dtype)
        if summed is not None:
            return summed, None
    normed = _norm(layer.norm1, x, dtype)
    attended, weights = layer.mha_layer(normed, normed, normed, attn_mask=mask, key_padding_mask=keys,
                                        pos_embs=positions)
    return attended + x, weights


def _fused_attention(mha: Layer, wrapper: Layer, x: Tensor, mask: Tensor | None, keys: Tensor | None,
                     embeddings: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Compute x plus self-attention of its norm; None if the kernels don't support a layer, a mask or positions."""
    reason = attention_refusal(mha, wrapper, x, mask, keys, embeddings)
    projected = None
    if reason is None and type(mha) is RelPosMHAXL:
        projected = mha.linear_pos(embeddings)  # called, since it may have hooks
        reason = projection_refusal(projected, x, dtype)
    if reason is not None:
        _log_refusal("attention", reason)
        return None

    positions: RotaryPositions | RelativePositions
    if projected is None:
        cosines, sines = rotary_table(x.shape[1], mha.head_dim, torch.float32, x.device)
        positions = RotaryPositions(cosines, sines)
    else:
        positions = RelativePositions(embeddings=projected[0], bias_u=mha.pos_bias_u.flatten(),
                                      bias_v=mha.pos_bias_v.flatten())
    return self_attention(
        x,
        norm=wrapper.norm,
        in_weight=mha.in_proj_weight,
        out_layer=mha.out_proj,
        positions=positions,
        heads=mha.num_heads,
        scale=mha.scale,
        dropout=mha.dropout if mha.training else 0.0,
        skip=keys,
        mask=mask,
        dtype=dtype,
    )


def attention_refusal(mha: Layer, wrapper: Layer, x: Tensor, mask: Tensor | None, keys: Tensor | None,
                      embeddings: Tensor | None) -> str | None:
    """Return why kernels can't compute self-attention ``mha`` of the norm of x; None if they can.

    wrapper : SpeechBrain's layer norm before it, which holds torch's
    mask : [T, T], True for pairs of frames that don't attend
    keys : [B, T], True for padding
    embeddings : [1, 2 T - 1, D], of relative positions, before they are projected
    """
    batch, frames, columns = x.shape
    if type(mha) not in (RoPEMHA, RelPosMHAXL):
        return f"its class is {type(mha).__name__}, not RoPEMHA or RelPosMHAXL"
    if type(wrapper) is not normalization.LayerNorm:
        return _OTHER_NORM
    if not mha._qkv_same_embed_dim:
        return "queries, keys and values have weights of their own"
    if mha.vbias is not None:
        return "values have a bias"
    if type(mha.out_proj) is not nn.Linear:
        return f"out_proj is a {type(mha.out_proj).__name__}, not a Linear"
    if not fused.known(mha, mha.out_proj, wrapper):
        return _CHANGED
    if not fused.fits(wrapper.norm, x.shape[-1:]):
        return _OTHER_NORM
    if mha.in_proj_weight.shape != (3 * columns, columns):
        return f"in_proj_weight is not [{3 * columns}, {columns}]"
    if not _gives(columns, mha.out_proj):
        return f"out_proj doesn't return {columns} features"
    if frames > WIDEST:
        return f"utterances have more than {WIDEST} frames"
    if not fused.masks(keys, (batch, frames)):
        return "the mask of padding is not a boolean tensor [B, T] on the CPU"
    if not fused.masks(mask, (frames, frames)):
        return "the mask of pairs of frames is not a boolean tensor [T, T] on the CPU"
    if mha.training and mha.dropout and not dropout.levels(mha.dropout):
        return _OTHER_DROPOUT
    if type(mha) is RoPEMHA:
        return "heads have an odd number of features, which can't be rotated" if mha.head_dim % 2 else None
    if type(embeddings) is not Tensor or embeddings.shape[:-1] != (1, 2 * frames - 1):
        return "the embeddings of relative positions are not a tensor [1, 2 T - 1, D]"
    if not mha.pos_bias_u.numel() == mha.pos_bias_v.numel() == columns:
        return f"pos_bias_u or pos_bias_v doesn't have {columns} values"
    return None


def projection_refusal(projected: object, x: Tensor, dtype: torch.dtype) -> str | None:
    """Return why kernels can't read projected embeddings of relative positions, which hooks may change."""
    _, frames, columns = x.shape
    if type(projected) is not Tensor or projected.shape[1:] != (2 * frames - 1, columns):
        return "linear_pos doesn't return a tensor [1, 2 T - 1, D]"
    if not projected.is_cpu or projected.dtype not in (torch.float32, dtype):
        return f"linear_pos returns {projected.dtype} on {projected.device}"
    return None


# ------------------------------------------------------------ convolution


class _ConvolutionLayers(NamedTuple):
    """The layers of a Conformer's convolution module that compute something, and all that are called."""

    first_norm: Layer
    first: Layer
    depthwise: Layer
    second_norm: Layer
    second: Layer
    dropout: Layer
    called: tuple[Layer, ...]


def _convolution(module: Layer, x: Tensor, mask: Tensor | None, chunks: DynChunkTrainConfig | None,
                 dtype: torch.dtype | None) -> Tensor:
    """Compute x plus the output of a convolution module, fused if possible."""
    if dtype is not None:
        layers = _convolution_layers(module)
        reason = _OTHER_LAYERS if layers is None else convolution_refusal(module, layers, x, mask)
        if layers is not None and reason is None:
            return convolution(
                x,
                skip=mask,
                first_norm=layers.first_norm,
                first=layers.first,
                depthwise=layers.depthwise,
                second_norm=layers.second_norm,
                second=layers.second,
                dropout=dropout.share(layers.dropout) or 0.0,
                chunk=chunks.chunk_size if chunks else x.shape[1],
                dtype=dtype,
            )
        _log_refusal("convolution module", str(reason))
    return x + module(x, mask, dynchunktrain_config=chunks)


def _convolution_layers(module: Layer) -> _ConvolutionLayers | None:
    """Return the layers of a convolution module; None if they are of other classes than SpeechBrain's and sbkit's."""
    if type(module) is not ConvolutionModule:
        return None
    before = _layers(module.bottleneck, _CONVOLUTION, _GLU)
    behind = _layers(module.after_conv, _NORMS, _SILUS, _LINEAR, _DROPOUTS)
    if before is None or behind is None:
        return None
    first, _ = before
    second_norm, _, second, drop = behind
    return _ConvolutionLayers(
        first_norm=module.layer_norm, first=first, depthwise=module.conv, second_norm=second_norm, second=second,
        dropout=drop, called=(module, module.bottleneck, *before, module.conv, module.after_conv, *behind))


def convolution_refusal(module: Layer, layers: _ConvolutionLayers, x: Tensor, mask: Tensor | None) -> str | None:
    """Return why kernels can't compute a convolution module of x; None if they can.

    mask : [B, T, 1], True for padding
    """
    batch, frames, columns = x.shape
    if module.causal:
        return "it is causal"
    if not fused.known(*layers.called):
        return _CHANGED
    if not fused.fits(layers.first_norm, x.shape[-1:]) or not fused.fits(layers.second_norm, x.shape[-1:]):
        return _OTHER_NORM
    if layers.first.kernel_size != (1,) or not _keeps_frames(layers.first, groups=1):
        return "its first layer is not a plain convolution of one tap"
    if not _keeps_frames(layers.depthwise, groups=columns):
        return "its depthwise convolution is not a plain one, centred, with an odd number of taps"
    if not _gives(2 * columns, layers.first):
        return f"its first layer doesn't return {2 * columns} features"
    if not _gives(columns, layers.depthwise):
        return f"its depthwise convolution doesn't return {columns} features"
    if not _gives(columns, layers.second):
        return f"its linear layer doesn't return {columns} features"
    if not fused.masks(mask, (batch, frames, 1)):
        return "the mask of padding is not a boolean tensor [B, T, 1] on the CPU"
    if dropout.share(layers.dropout) is None:
        return _OTHER_DROPOUT
    return None


# ------------------------------------------------------------ what layers are


#: Reasons that several parts share.
_OTHER_LAYERS = "a layer is of a class that they don't know"
_CHANGED = "a layer has a hook, a forward of its own, or parameters that are not plain float32 tensors on the CPU"
_OTHER_NORM = f"a norm is not a LayerNorm over the features, of which there may be {WIDEST}"
_OTHER_DROPOUT = "its share of dropout is too close to 0 or 1, or it works in place"


def _keeps_frames(layer: Layer, groups: int) -> bool:
    """Whether a layer is a plain convolution that is centred and keeps the number of frames."""
    return (type(layer) is nn.Conv1d and layer.groups == groups and layer.kernel_size[0] % 2 == 1
            and layer.padding == (layer.kernel_size[0] // 2,) and layer.padding_mode == "zeros"
            and layer.stride == layer.dilation == (1,))


def _gives(columns: int, layer: Layer) -> bool:
    """Whether the weight and the bias of a layer give ``columns``."""
    return len(layer.weight) == columns and layer.bias.shape == (columns,)


def _layers(module: Layer, *kinds: tuple[type, ...]) -> list[Layer] | None:
    """Return the layers of a plain Sequential, if the class of each is one of its ``kinds``; otherwise None."""
    layers: list[Layer] = list(module._modules.values())
    if type(module) is not nn.Sequential or len(layers) != len(kinds):
        return None
    for layer, classes in zip(layers, kinds, strict=True):
        if type(layer) not in classes:
            return None
        if type(layer) is activations.Swish and layer.beta != 1:  # with a beta of 1 it is SiLU
            return None
    return layers


class PositionalwiseFeedForward(attention.PositionalwiseFeedForward):
    """``PositionalwiseFeedForward``: [B, T, D] to [B, T, D], without the original's permutation to [T, B, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x)


#: Classes of layers whose computation the kernels know.
_NORMS = (nn.LayerNorm, LayerNorm)
_LINEAR = (nn.Linear,)
_GLU = (nn.GLU,)
_CONVOLUTION = (nn.Conv1d,)
_DROPOUTS = (nn.Dropout, Dropout)
_SILUS = (nn.SiLU, activations.Swish)
_FEED_FORWARDS = (attention.PositionalwiseFeedForward, PositionalwiseFeedForward)
