"""The layers of SpeechBrain's Conformer on one chunk of a stream, and on whole utterances chunk by chunk.

A stream's chunk may end with lookahead frames (*ahead*): the others see them, and they are computed again at the
beginning of the next chunk, where they see the frames after them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sbkit.nn.chunks import ChunkConfig
from sbkit.nn.fast.attention import rotary_table
from sbkit.nn.fast.fused import Layer
from sbkit.nn.lengths import lengths_to_mask


class EncoderState(NamedTuple):
    """The state of streams between two steps: of constant size, zeros at the beginning."""

    keys: Tensor
    """``[B, L, left, D]`` of the last frames of each layer, not rotated: only relative positions matter."""
    values: Tensor
    """``[B, L, left, D]``."""
    convolution: Tensor
    """``[B, L, D, K // 2]``, the last inputs of each layer's depthwise convolution."""
    front: Tensor
    """``[B, N]``, the front end's state; the layers don't change it."""
    seen: Tensor
    """``[B]`` int64: how many of ``left`` are real."""


def initial_state(encoder: Layer, batch: int, left: int, front: int = 0) -> EncoderState:
    """Make the initial state of a ``TransformerASR``, and of a front end whose state has ``front`` numbers."""
    layers = encoder.encoder.layers
    width, around = layers[0].mha_layer.embed_dim, layers[0].convolution_module.padding
    weight = layers[0].mha_layer.in_proj_weight
    window = weight.new_zeros(batch, len(layers), left, width)
    return EncoderState(window, window.clone(), weight.new_zeros(batch, len(layers), width, around),
                        weight.new_zeros(batch, front), torch.zeros(batch, dtype=torch.int64, device=weight.device))


def step(encoder: Layer, x: Tensor, counts: Tensor, state: EncoderState, ahead: int = 0) -> tuple[Tensor, EncoderState]:
    """Compute encoder states [B, T', D] of a chunk, and the state for the next one.

    encoder : a ``TransformerASR`` of Conformer layers
    x : [B, T', D'], what the front end gives
    counts : [B], how many of T' are real
    ahead : lookahead, the last of T' with which the next chunk begins
    """
    layers, left = encoder.encoder.layers, state.keys.shape[2]
    x = encoder.custom_src_module(x)
    window = _Context(left, ahead, x, counts, state.seen, layers[0].mha_layer.head_dim)
    after = []
    for number, layer in enumerate(layers):
        x, *parts = _layer_step(layer, x, window, *(part[:, number] for part in state[:3]))
        after.append(parts)
    keys, values, convolution = (torch.stack(parts, 1) for parts in zip(*after, strict=True))
    seen = (state.seen + window.shift).clamp(max=left)
    return encoder.encoder.norm(x), EncoderState(keys, values, convolution, state.front, seen)


def encode_in_chunks(encoder: Layer, source: Tensor, frames: Tensor, subsampling: int, config: ChunkConfig) -> Tensor:
    """Compute encoder states [B, T', D] of whole utterances step by step, as on a stream.

    source : [B, T', D'], the outputs of a causal front end
    frames : [B] feature frames
    subsampling : feature frames per encoder frame
    """
    size, shift, longest = config.chunk_size, config.chunk_size - config.ahead, source.shape[1]
    steps = max(0, longest - config.ahead) // shift + 1
    source = functional.pad(source, (0, 0, 0, (steps - 1) * shift + size - longest))
    state = initial_state(encoder, len(source), config.left_context_size_frames())
    remaining, active, out = frames, frames > 0, None
    for start in range(0, steps * shift, shift):
        counts = torch.div(remaining + subsampling - 1, subsampling, rounding_mode="floor").clamp(0, size)
        x, state = step(encoder, source[:, start : start + size], counts, state, config.ahead)
        out = x.new_zeros(*source.shape[:2], x.shape[2]) if out is None else out
        out[:, start : start + size] = torch.where(active[:, None, None], x, out[:, start : start + size])
        active = active & (remaining >= size * subsampling)  # a full chunk is always followed by another
        remaining = remaining - shift * subsampling
    assert out is not None, "there is at least one step"
    return out[:, :longest]


class _Context:
    """The positions that the frames of a chunk attend to: the left context, then the chunk itself."""

    def __init__(self, left: int, ahead: int, x: Tensor, counts: Tensor, seen: Tensor, head: int):
        self.left, self.size = left, x.shape[1]
        self.shift = self.size - ahead
        """Frames from this chunk's first to the next one's."""
        self._rotary = [table[:, None] for table in rotary_table(left + self.size, head, x.dtype, x.device)]
        self.kept = lengths_to_mask(counts, self.size)[..., None]
        """``[B, T', 1]``, True for real frames of the chunk."""
        place = torch.arange(left + self.size, device=x.device)
        visible = (place >= left - seen[:, None]) & (place < left + counts[:, None])
        never = torch.finfo(x.dtype).min / 2  # finite: no NaN in rows without visible frames
        self.bias = torch.zeros_like(visible, dtype=x.dtype).masked_fill(~visible, never)[:, None, None]
        """``[B, 1, 1, left + T']``, added to scores."""

    def rotated(self, x: Tensor) -> Tensor:
        """Rotate [B, N, H, K] by the last N positions of the window."""
        cosines, sines = (table[self.left + self.size - x.shape[1]:] for table in self._rotary)
        return x * cosines + _swapped(x) * sines


def _swapped(x: Tensor) -> Tensor:
    """Swap the values of each pair [..., 2 i] and [..., 2 i + 1]."""
    if not torch.compiler.is_exporting():
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    # Runtimes move one number at a time to swap two; a product with ones and zeros is exact, and ten times as fast.
    pairs = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).unflatten(-1, (-1, 2))
    return torch.matmul(x, pairs.flip(-1).flatten(-2))


def _layer_step(layer: Layer, x: Tensor, window: _Context, keys: Tensor, values: Tensor,
                convolution: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute one layer of a chunk [B, T', D], and the states of its attention and its convolution for the next."""
    x = x + 0.5 * layer.ffn_module1(x)
    attended, keys, values = _attend(layer.mha_layer, layer.norm1(x), window, keys, values)
    x = x + attended
    convolved, convolution = _convolve(layer.convolution_module, x, window, convolution)
    x = x + convolved
    return layer.norm2(x + 0.5 * layer.ffn_module2(x)), keys, values, convolution


def _attend(mha: Layer, x: Tensor, window: _Context, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention of a chunk to its window, and the keys and values [B, left, D] for the next chunk."""
    heads, size = mha.num_heads, mha.head_dim
    qkv = functional.linear(x, mha.in_proj_weight).unflatten(-1, (heads, 3 * size))
    query, key, value = qkv.split(size, -1)
    keys, values = torch.cat([keys, key.flatten(2)], 1), torch.cat([values, value.flatten(2)], 1)
    query = window.rotated(query).transpose(1, 2)
    key = window.rotated(keys.unflatten(-1, (heads, size))).permute(0, 2, 3, 1)
    weights = (torch.matmul(query * mha.scale, key) + window.bias).softmax(-1)
    out = torch.matmul(weights, values.unflatten(-1, (heads, size)).transpose(1, 2))
    places = slice(window.shift, window.shift + window.left)
    return mha.out_proj(out.transpose(1, 2).flatten(2)), keys[:, places], values[:, places]


def _convolve(module: Layer, x: Tensor, window: _Context, before: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the convolution module of a chunk, and the inputs [B, D, K // 2] for the next chunk."""
    pointwise, conv = module.bottleneck[0], module.conv
    gated = functional.glu(functional.linear(module.layer_norm(x), pointwise.weight.squeeze(-1), pointwise.bias))
    inputs = torch.cat([before, gated.masked_fill(~window.kept, 0.0).transpose(1, 2)], 2)
    out = functional.conv1d(functional.pad(inputs, (0, module.padding)), conv.weight, conv.bias, groups=conv.groups)
    return module.after_conv(out.transpose(1, 2)), inputs[..., window.shift : window.shift + before.shape[2]]
