"""SpeechBrain's Conformer layer, its convolution module and its feed-forward layer in fewer passes over memory."""

from __future__ import annotations

import functools

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
from sbkit.nn.fast.norm import LayerNorm
from sbkit.nn.guard import has_values
from sbkit.nn.native import trial
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


def _norm(module: Layer, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Apply a layer norm, with outputs in ``dtype`` if the fused norm can be used."""
    fast = (dtype is not None and type(module) is normalization.LayerNorm and fused.known(module)
            and fused.fits(module.norm, x.shape[-1:]))
    return fused.norm(x, module.norm, dtype) if fast and dtype is not None else module(x)


def _feed_forward(module: Layer, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Compute x plus half the output of a feed-forward module, fused if possible."""
    parts = None if dtype is None else _parts(module, _NORMS, _FEED_FORWARDS, _DROPOUTS)
    layers = _parts(parts[1].ffn, _LINEAR, _SILUS, _DROPOUTS, _LINEAR) if parts else None
    if dtype is not None and parts and layers and fused.fits(parts[0], x.shape[-1:]):
        before, _, outer = parts
        first, _, inner, second = layers
        shares = dropout.share(inner), dropout.share(outer)
        columns = x.shape[-1]
        if None not in shares and first.bias.shape == first.weight.shape[:1] and _gives(columns, second):
            return fused.FeedForwardPart.apply(x, before.weight, before.bias, first.weight, first.bias, second.weight,
                                               second.bias, before.eps, *shares, 0.5, dtype)
    return torch.add(x, module(x), alpha=0.5)


def _attend(layer: Layer, x: Tensor, mask: Tensor | None, keys: Tensor | None, positions: Tensor | None,
            dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Compute x plus self-attention of its norm, fused if possible; returns the attention weights too, or None."""
    summed = None if dtype is None else _fused_attention(layer.mha_layer, layer.norm1, x, mask, keys, positions, dtype)
    if summed is not None:
        return summed, None
    normed = _norm(layer.norm1, x, dtype)
    attended, weights = layer.mha_layer(normed, normed, normed, attn_mask=mask, key_padding_mask=keys,
                                        pos_embs=positions)
    return attended + x, weights


def _fused_attention(mha: Layer, wrapper: Layer, x: Tensor, mask: Tensor | None, keys: Tensor | None,
                     positions: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Compute x plus self-attention of its norm; None if the kernels don't support a layer, a mask or positions."""
    b, t, columns = x.shape
    if (type(mha) not in (RoPEMHA, RelPosMHAXL) or type(wrapper) is not normalization.LayerNorm
            or not mha._qkv_same_embed_dim or mha.vbias is not None or type(mha.out_proj) is not nn.Linear
            or not fused.known(mha, mha.out_proj, wrapper) or not fused.fits(wrapper.norm, x.shape[-1:])
            or mha.in_proj_weight.shape != (3 * columns, columns) or not _gives(columns, mha.out_proj) or t > WIDEST
            or not fused.masks(keys, (b, t)) or not fused.masks(mask, (t, t))):
        return None
    p = mha.dropout if mha.training else 0.0
    if p and not dropout.levels(p):
        return None
    size = mha.head_dim
    norm = wrapper.norm
    table = near = far = None
    if type(mha) is RoPEMHA:
        if size % 2:
            return None
        table = rotary_table(t, size, torch.float32, x.device)
        positions = None
    else:
        near, far = mha.pos_bias_u.flatten(), mha.pos_bias_v.flatten()
        if type(positions) is not Tensor or positions.shape[:-1] != (1, 2 * t - 1) \
                or not len(near) == len(far) == columns:
            return None
        places = mha.linear_pos(positions)
        if type(places) is not Tensor or places.shape[1:] != (2 * t - 1, columns) or not places.is_cpu \
                or places.dtype not in (torch.float32, dtype):
            return None
        positions = places[0]
    return fused.AttentionPart.apply(
        x, keys, norm.weight, norm.bias, mha.in_proj_weight, near, far, positions, mha.out_proj.weight,
        mha.out_proj.bias, table, mask, mha.num_heads, mha.scale, norm.eps, p, dtype)


def _convolution(module: Layer, x: Tensor, mask: Tensor | None, chunks: DynChunkTrainConfig | None,
                 dtype: torch.dtype | None) -> Tensor:
    """Compute x plus the output of a convolution module, fused if possible."""
    if (dtype is not None and type(module) is ConvolutionModule and not module.causal
            and fused.known(module, module.conv) and fused.fits(module.layer_norm, x.shape[-1:])):
        first = _parts(module.bottleneck, _CONVOLUTION, _GLU)
        behind = _parts(module.after_conv, *_AFTER_CONVOLUTION)
        before = module.layer_norm
        conv = module.conv
        _, t, columns = x.shape
        if (first and behind and fused.fits(behind[0], x.shape[-1:]) and _convolves(first[0], 1)
                and first[0].kernel_size == (1,) and _convolves(conv, columns) and fused.masks(mask, (*x.shape[:2], 1))
                and _gives(2 * columns, first[0]) and _gives(columns, conv) and _gives(columns, behind[2])):
            after, _, second, drop = behind
            p = dropout.share(drop)
            if p is not None:
                return fused.ConvolutionPart.apply(
                    x, mask, before.weight, before.bias, first[0].weight, first[0].bias, conv.weight, conv.bias,
                    after.weight, after.bias, second.weight, second.bias, (before.eps, after.eps), p, dtype,
                    chunks.chunk_size if chunks else t)
    return x + module(x, mask, dynchunktrain_config=chunks)


def _convolves(layer: Layer, groups: int) -> bool:
    """Whether a layer is a plain convolution that is centred and keeps the number of frames."""
    return (type(layer) is nn.Conv1d and layer.groups == groups and layer.kernel_size[0] % 2 == 1
            and layer.padding == (layer.kernel_size[0] // 2,) and layer.padding_mode == "zeros"
            and layer.stride == layer.dilation == (1,))


def _gives(columns: int, layer: Layer) -> bool:
    """Whether the weight and the bias of a layer give ``columns``."""
    return len(layer.weight) == columns and layer.bias.shape == (columns,)


def _parts(module: Layer, *kinds: tuple[type, ...]) -> list[Layer] | None:
    """Return the layers of a plain Sequential if they have exactly these classes and are known, otherwise None."""
    layers: list[Layer] = list(module._modules.values())
    if type(module) is not nn.Sequential or len(layers) != len(kinds):
        return None
    for layer, kind in zip(layers, kinds, strict=True):
        if type(layer) not in kind or (type(layer) is activations.Swish and layer.beta != 1):
            return None
    return layers if fused.known(module, *layers) else None


class PositionalwiseFeedForward(attention.PositionalwiseFeedForward):
    """``PositionalwiseFeedForward``: [B, T, D] to [B, T, D], without the original's permutation to [T, B, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x)


_NORMS, _LINEAR, _GLU, _CONVOLUTION = (nn.LayerNorm, LayerNorm), (nn.Linear,), (nn.GLU,), (nn.Conv1d,)
_DROPOUTS, _SILUS = (nn.Dropout, Dropout), (nn.SiLU, activations.Swish)
_FEED_FORWARDS = (attention.PositionalwiseFeedForward, PositionalwiseFeedForward)
_AFTER_CONVOLUTION = _NORMS, _SILUS, _LINEAR, _DROPOUTS
