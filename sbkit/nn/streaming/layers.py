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
from sbkit.nn.fast.attention import rotary_attention, rotary_table
from sbkit.nn.fast.conformer import convolve
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
    layers = encoder.encoder.layers
    left = state.keys.shape[2]
    size = x.shape[1]
    shift = size - ahead  # frames from this chunk's first to the next one's
    x = encoder.custom_src_module(x)
    padding = ~lengths_to_mask(counts, size)[..., None]
    table = rotary_table(left + size, layers[0].mha_layer.head_dim, x.dtype, x.device)
    place = torch.arange(left + size, device=x.device)
    visible = (place >= left - state.seen[:, None]) & (place < left + counts[:, None])
    never = torch.finfo(x.dtype).min / 2  # finite: no NaN in rows without visible frames
    bias = torch.zeros_like(visible, dtype=x.dtype).masked_fill(~visible, never)[:, None, None]
    after = []
    for layer, keys, values, taps in zip(layers, *(part.unbind(1) for part in state[:3]), strict=True):
        x = x + 0.5 * layer.ffn_module1(x)
        attended, window = rotary_attention(layer.mha_layer, layer.norm1(x), bias, table, (keys, values))
        x = x + attended
        convolved, inputs = convolve(layer.convolution_module, x, padding, before=taps)
        x = x + convolved
        x = layer.norm2(x + 0.5 * layer.ffn_module2(x))
        assert window is not None, "there is one before"
        after.append((*(part[:, shift : shift + left] for part in window), inputs[..., shift : shift + taps.shape[2]]))
    keys, values, convolution = (torch.stack(parts, 1) for parts in zip(*after, strict=True))
    seen = (state.seen + shift).clamp(max=left)
    return encoder.encoder.norm(x), EncoderState(keys, values, convolution, state.front, seen)


def encode_in_chunks(encoder: Layer, source: Tensor, frames: Tensor, subsampling: int, config: ChunkConfig) -> Tensor:
    """Compute encoder states [B, T', D] of whole utterances step by step, as on a stream.

    source : [B, T', D'], the outputs of a causal front end
    frames : [B] feature frames
    subsampling : feature frames per encoder frame
    """
    size = config.chunk_size
    shift = config.chunk_size - config.ahead
    longest = source.shape[1]
    steps = max(0, longest - config.ahead) // shift + 1
    source = functional.pad(source, (0, 0, 0, (steps - 1) * shift + size - longest))
    state = initial_state(encoder, len(source), config.left_context_size_frames())
    remaining = frames
    active = frames > 0
    out = None
    for start in range(0, steps * shift, shift):
        counts = torch.div(remaining + subsampling - 1, subsampling, rounding_mode="floor").clamp(0, size)
        x, state = step(encoder, source[:, start : start + size], counts, state, config.ahead)
        out = x.new_zeros(*source.shape[:2], x.shape[2]) if out is None else out
        out[:, start : start + size] = torch.where(active[:, None, None], x, out[:, start : start + size])
        active = active & (remaining >= size * subsampling)  # a full chunk is always followed by another
        remaining = remaining - shift * subsampling
    assert out is not None, "there is at least one step"
    return out[:, :longest]
