"""One step of a recogniser on a stream: a chunk of features and a state to log-probabilities and the next state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.fast.attention import rotary_table
from sbkit.nn.fast.fused import Layer
from sbkit.nn.lengths import lengths_to_mask
from sbkit.nn.streaming import requirements
from sbkit.nn.streaming.requirements import Parts


class State(NamedTuple):
    """What a step takes from those before it: zeros at the beginning of a stream, and of a size that never changes."""

    keys: Tensor
    """``[B, L, left, D]`` of the last frames of each layer, not rotated: only distances between places matter."""
    values: Tensor
    """``[B, L, left, D]``."""
    convolution: Tensor
    """``[B, L, D, K // 2]``, the last inputs of each layer's depthwise convolution."""
    front: Tensor
    """``[B, N]``, all that the front end keeps."""
    seen: Tensor
    """``[B]`` int64: how many of ``left`` there are."""


class StreamingEncoder(nn.Module):
    """Normalisation, front end, Conformer and CTC head of a recogniser as a pure function, for export.

    Chunk by chunk it gives what the recogniser gives for the whole utterance with ``chunks``. It has no control flow
    that depends on data. Its modules are the recogniser's own.

    Arguments
    ---------
    recognizer : with ``chunks``, and a front end that has ``forward_step``, such as CausalFrontEnd
    left : left context in encoder frames; None: the most that it was trained for
    """

    def __init__(self, recognizer: Parts, left: int | None = None):
        super().__init__()
        requirements.refuse(requirements.of_step(recognizer))
        chunks = recognizer.chunks
        assert chunks is not None, "others are refused"
        self.left: int = chunks.config(chunks.sizes[0], left).left_context_size_frames()
        self.normalize, self.frontend = recognizer.normalize, recognizer.frontend
        self.encoder, self.ctc_lin = recognizer.encoder, recognizer.ctc_lin
        self.subsampling: int = recognizer.frontend.subsampling
        """Feature frames per encoder frame."""
        self._front = [part.shape[1:] for part in self.frontend.state(1)]

    def state(self, batch: int) -> State:
        """Make the state of ``batch`` streams that begin."""
        layers = self.encoder.encoder.layers
        width, around = layers[0].mha_layer.embed_dim, layers[0].convolution_module.padding
        weight = layers[0].mha_layer.in_proj_weight
        window = weight.new_zeros(batch, len(layers), self.left, width)
        return State(window, window.clone(), weight.new_zeros(batch, len(layers), width, around),
                     weight.new_zeros(batch, sum(shape.numel() for shape in self._front)),
                     torch.zeros(batch, dtype=torch.int64, device=weight.device))

    def forward(self, features: Tensor, frames: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Compute log-probabilities [B, T', V], how many of T' there are [B], and the next state.

        A stream is fed chunks of equal size; its last one may have fewer real frames, after which its row must begin
        anew. The state of a row without any (0 of ``frames``) stays as it is.

        Arguments
        ---------
        features : [B, T, F] as they are computed, before normalisation; T is T' times ``subsampling``
        frames : [B] int64, how many of T are real; the others may have any values
        """
        there = lengths_to_mask(frames, features.shape[1])
        feats = features if self.normalize is None else self.normalize(features)
        x, front = self._in_front(feats.masked_fill(~there[..., None], 0.0), state.front)
        counts = torch.div(frames + self.subsampling - 1, self.subsampling, rounding_mode="floor")
        x = self.encoder.custom_src_module(x)
        window = _Window(self.left, x, counts, state.seen, self.encoder.encoder.layers[0].mha_layer.head_dim)
        layers = []
        for number, layer in enumerate(self.encoder.encoder.layers):
            x, *kept = _layer_step(layer, x, window, *(part[:, number] for part in state[:3]))
            layers.append(kept)
        log_probs = self.ctc_lin(self.encoder.encoder.norm(x)).float().log_softmax(-1)
        seen = (state.seen + window.size).clamp(max=self.left)
        keys, values, convolution = (torch.stack(parts, 1) for parts in zip(*layers, strict=True))
        after = State(keys, values, convolution, front, seen)
        return log_probs, counts, _moved(frames > 0, after, state)

    def _in_front(self, feats: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Run the front end: [B, T, F] and its packed state to [B, T', D] and its next one."""
        parts = packed.split([shape.numel() for shape in self._front], 1)
        before = tuple(part.unflatten(1, shape) for part, shape in zip(parts, self._front, strict=True))
        x, after = self.frontend.forward_step(feats, before)
        return x.flatten(2), torch.cat([part.flatten(1) for part in after], 1)


class _Window:
    """The places that the frames of a chunk see: the left context, then the chunk itself."""

    def __init__(self, left: int, x: Tensor, counts: Tensor, seen: Tensor, head: int):
        self.left, self.size = left, x.shape[1]
        self._turns = [table[:, None] for table in rotary_table(left + self.size, head, x.dtype, x.device)]
        self.kept = lengths_to_mask(counts, self.size)[..., None]
        """``[B, T', 1]``, True for real frames of the chunk."""
        place = torch.arange(left + self.size, device=x.device)
        heard = (place >= left - seen[:, None]) & (place < left + counts[:, None])
        never = torch.finfo(x.dtype).min / 2  # finite: no NaN in rows that hear nothing
        self.bias = torch.zeros_like(heard, dtype=x.dtype).masked_fill(~heard, never)[:, None, None]
        """``[B, 1, 1, left + T']``, added to scores."""

    def turned(self, x: Tensor) -> Tensor:
        """Rotate [B, N, H, K] by the last N places of the window."""
        cosines, sines = (table[self.left + self.size - x.shape[1]:] for table in self._turns)
        return x * cosines + _swapped(x) * sines


def _swapped(x: Tensor) -> Tensor:
    """Swap the values of each pair [..., 2 i] and [..., 2 i + 1]."""
    if not torch.compiler.is_exporting():
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    # Runtimes move one number at a time to swap two; a product with ones and zeros is exact, and ten times as fast.
    pairs = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).unflatten(-1, (-1, 2))
    return torch.matmul(x, pairs.flip(-1).flatten(-2))


def _layer_step(layer: Layer, x: Tensor, window: _Window, keys: Tensor, values: Tensor,
                convolution: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute one layer of a chunk [B, T', D], and the states of its attention and its convolution for the next."""
    x = x + 0.5 * layer.ffn_module1(x)
    attended, keys, values = _attend(layer.mha_layer, layer.norm1(x), window, keys, values)
    x = x + attended
    convolved, convolution = _convolve(layer.convolution_module, x, window, convolution)
    x = x + convolved
    return layer.norm2(x + 0.5 * layer.ffn_module2(x)), keys, values, convolution


def _attend(mha: Layer, x: Tensor, window: _Window, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention of a chunk to its window, and the keys and values [B, left, D] for the next chunk."""
    heads, size = mha.num_heads, mha.head_dim
    qkv = functional.linear(x, mha.in_proj_weight).unflatten(-1, (heads, 3 * size))
    query, key, value = qkv.split(size, -1)
    keys, values = torch.cat([keys, key.flatten(2)], 1), torch.cat([values, value.flatten(2)], 1)
    query = window.turned(query).transpose(1, 2)
    key = window.turned(keys.unflatten(-1, (heads, size))).permute(0, 2, 3, 1)
    weights = (torch.matmul(query * mha.scale, key) + window.bias).softmax(-1)
    out = torch.matmul(weights, values.unflatten(-1, (heads, size)).transpose(1, 2))
    return mha.out_proj(out.transpose(1, 2).flatten(2)), keys[:, window.size :], values[:, window.size :]


def _convolve(module: Layer, x: Tensor, window: _Window, before: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the convolution module of a chunk, and the inputs [B, D, K // 2] for the next chunk."""
    pointwise, conv = module.bottleneck[0], module.conv
    gated = functional.glu(functional.linear(module.layer_norm(x), pointwise.weight.squeeze(-1), pointwise.bias))
    inputs = torch.cat([before, gated.masked_fill(~window.kept, 0.0).transpose(1, 2)], 2)
    out = functional.conv1d(functional.pad(inputs, (0, module.padding)), conv.weight, conv.bias, groups=conv.groups)
    return module.after_conv(out.transpose(1, 2)), inputs[..., window.size :]


def _moved(moves: Tensor, after: State, before: State) -> State:
    """Take the next state of rows [B] that move on, and the state before of those that don't."""
    return State(*(torch.where(moves.view(-1, *(1,) * (new.dim() - 1)), new, old)
                   for new, old in zip(after, before, strict=True)))
