"""Equivalents of SpeechBrain's layers that can be exported: sizes stay symbolic, nothing is kept between calls.

The originals can't be exported because ``len(tensor)`` fixes the batch size, tables that are cached or have a fixed
length fix the time, Python loops over frames are unrolled, and branches depend on values. Parameters and checkpoint
keys are the same: only classes are swapped, as in ``sbkit.nn.accelerate``. A user's subclass is not changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch
from speechbrain.lobes.models.transformer import Transformer
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.nnet import RNN, attention, pooling
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch import Tensor, nn

from sbkit.errors import SbkitError
from sbkit.nn.accelerate import FASTER, accelerate, swap
from sbkit.nn.lengths import lengths_to_mask
from sbkit.nn.recurrent import reverse, with_lengths

S = TypeVar("S")


def _scan(step: Callable[[S, Tensor], tuple[S, Tensor]], state: S, frames: Tensor) -> Tensor:
    """Run ``step`` over inputs [B, T, D]; returns the states of all frames [B, T, H]."""
    from torch._higher_order_ops.scan import scan

    return scan(step, state, frames.transpose(0, 1).contiguous())[1].transpose(0, 1)


class _Light:
    """A layer of SpeechBrain's light GRUs, with both directions in one batch: [B, T, D] -> [B, T, H]."""

    bidirectional: bool
    w: nn.Module
    u: nn.Module
    norm: nn.Module
    act: Callable[[Tensor], Tensor]
    h_init: Tensor

    def _recurrent(self, before: Tensor) -> Tensor:
        """Compute the contribution of the previous state."""
        return self.u(before)

    def forward(self, x: Tensor, hx: None = None, lengths: Tensor | None = None) -> Tensor:
        batch = x.shape[0]
        if self.bidirectional:
            x = torch.cat([x, reverse(x, lengths)])
        from_input_BTH = self.norm(self.w(x).flatten(0, 1)).unflatten(0, (x.shape[0], x.shape[1]))

        def step(before: Tensor, from_input: Tensor) -> tuple[Tensor, Tensor]:
            candidate, gate = (from_input + self._recurrent(before)).chunk(2, 1)
            gate = torch.sigmoid(gate)
            after = gate * before + (1 - gate) * self.act(candidate)
            return after, after.clone()

        states = _scan(step, self.h_init.expand(x.shape[0], -1).contiguous(), from_input_BTH)
        if not self.bidirectional:
            return states
        return torch.cat([states[:batch], reverse(states[batch:], lengths)], dim=2)


class _LightNormed(_Light):
    """A layer of SpeechBrain's stabilised light GRUs: [B, T, D] -> [B, T, H]."""

    layer_norm: nn.Module

    def _recurrent(self, before: Tensor) -> Tensor:
        return self.layer_norm(super()._recurrent(before))


class _LightStack:
    """A stack of light GRU layers; unlike the original's, its forward returns None for the final states."""

    rnn: nn.ModuleList

    def forward(self, x: Tensor, hx: None = None, lengths: Tensor | None = None) -> tuple[Tensor, None]:
        x = x.flatten(2)
        for layer in self.rnn:
            x = layer(x, lengths=lengths)
        return x, None


_State = tuple[Tensor, ...]  # the hidden state [B, H] first


def _lstm(from_input: Tensor, from_hidden: Tensor, state: _State) -> _State:
    i, f, g, o = (from_input + from_hidden).chunk(4, 1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(from_input: Tensor, from_hidden: Tensor, state: _State) -> _State:
    input_r, input_z, input_n = from_input.chunk(3, 1)
    hidden_r, hidden_z, hidden_n = from_hidden.chunk(3, 1)
    keep = torch.sigmoid(input_z + hidden_z)
    candidate = torch.tanh(input_n + torch.sigmoid(input_r + hidden_r) * hidden_n)
    return (keep * state[0] + (1 - keep) * candidate,)


#: By the mode of torch's layer: a function from the products of the input and of the hidden state with their weights,
#: and the state, to the next state; and the number of tensors of a state.
_CELLS: dict[str, tuple[Callable[[Tensor, Tensor, _State], _State], int]] = {
    "LSTM": (_lstm, 2), "GRU": (_gru, 1),
    "RNN_TANH": (lambda from_input, from_hidden, state: (torch.tanh(from_input + from_hidden),), 1),
    "RNN_RELU": (lambda from_input, from_hidden, state: (torch.relu(from_input + from_hidden),), 1),
}


class _TorchRecurrent:
    """One of torch's recurrent layers in SpeechBrain's wrapper: [B, T, D] -> [B, T, H]; no final states."""

    rnn: nn.RNNBase

    def forward(self, x: Tensor, hx: None = None, lengths: None = None) -> tuple[Tensor, None]:
        x = x.flatten(2)
        for layer in range(self.rnn.num_layers):
            directions = [_direction(self.rnn, f"_l{layer}", x)]
            if self.rnn.bidirectional:
                backward = _direction(self.rnn, f"_l{layer}_reverse", reverse(x, lengths))
                directions.append(reverse(backward, lengths))
            x = torch.cat(directions, dim=-1)
        return x, None


def _direction(rnn: nn.RNNBase, name: str, x: Tensor) -> Tensor:
    """Run one direction of a layer, whose parameters end with ``name``: [B, T, D] -> [B, T, H]."""
    cell, tensors_of_state = _CELLS[rnn.mode]
    hidden_weight = getattr(rnn, f"weight_hh{name}")
    hidden_bias = getattr(rnn, f"bias_hh{name}", None)
    from_input_BTH = nn.functional.linear(x, getattr(rnn, f"weight_ih{name}"), getattr(rnn, f"bias_ih{name}", None))

    def step(state: _State, from_input: Tensor) -> tuple[_State, Tensor]:
        state = cell(from_input, nn.functional.linear(state[0], hidden_weight, hidden_bias), state)
        return state, state[0].clone()

    start = x.new_zeros(x.shape[0], rnn.hidden_size)
    return _scan(step, tuple(start.clone() for _ in range(tensors_of_state)), from_input_BTH)


def _pool(x: Tensor, axis: int, size: int, kind: str) -> Tensor:
    """Pool an axis in windows of ``size``; an incomplete last window is dropped."""
    count = x.shape[axis] // size
    x = x.narrow(axis, 0, count * size).unflatten(axis, (count, size))
    return x.amax(axis + 1) if kind == "max" else x.mean(axis + 1)


def _no_overlap(layer: nn.Module) -> bool:
    """Whether pooling windows neither overlap nor reach beyond the edges."""
    paddings = layer.padding if isinstance(layer.padding, tuple) else (layer.padding,)
    dilation = getattr(layer, "dilation", 1)
    dilations = dilation if isinstance(dilation, tuple) else (dilation,)
    return (layer.stride == layer.kernel_size and not any(paddings) and not layer.ceil_mode
            and all(dilation == 1 for dilation in dilations))


class ExportedPooling1d(pooling.Pooling1d):
    """``Pooling1d`` by reshaping, since torch's pooling fixes in the graph whether the number of frames is even."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.pool_layer
        if not _no_overlap(layer):
            return super().forward(x)
        size = layer.kernel_size[-1] if isinstance(layer.kernel_size, tuple) else layer.kernel_size
        return _pool(x, self.pool_axis, size, "max" if "Max" in type(layer).__name__ else "mean")


class ExportedPooling2d(pooling.Pooling2d):
    """``Pooling2d`` by reshaping, for the same reason as :class:`ExportedPooling1d`."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.pool_layer
        if not _no_overlap(layer):
            return super().forward(x)
        sizes = layer.kernel_size if isinstance(layer.kernel_size, (tuple, list)) else (layer.kernel_size,) * 2
        for axis, size in zip(self.pool_axis, sizes, strict=True):
            x = _pool(x, axis, size, "max" if self.pool_type != "avg" else "mean")
        return x


#: The class with the replacement forward of each recurrent layer.
_RECURRENT: dict[type, type] = {
    RNN.LiGRU: _LightStack, RNN.LiGRU_Layer: _Light, RNN.SLiGRU: _LightStack, RNN.SLiGRU_Layer: _LightNormed,
    RNN.RNN: _TorchRecurrent, RNN.LSTM: _TorchRecurrent, RNN.GRU: _TorchRecurrent,
}


def exportable(module: nn.Module) -> Counter[str]:
    """Swap the class of each layer that has an equivalent for export; returns how many of each class were swapped."""
    accelerate(module)
    return swap(module, EQUIVALENTS)


class ExportedTransformerASR(TransformerASR):
    """``TransformerASR`` with masks computed from shapes alone."""

    def encode(self, src: Tensor, wav_len: Tensor | None = None, pad_idx: int = 0,
               dynchunktrain_config: DynChunkTrainConfig | None = None) -> Tensor:
        """[B, T, F] and relative lengths [B] to [B, T, D]."""
        if dynchunktrain_config is not None:
            raise SbkitError("not-exportable",
                             "an encoder that attends in chunks (dynchunktrain_config) can't be exported",
                             hint="leave it out: the exported model attends to whole recordings",
                             key="dynchunktrain_config")
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


_BY_ORIGINAL: dict[type, type] = {
    TransformerASR: ExportedTransformerASR,
    Transformer.PositionalEncoding: ExportedPositionalEncoding,
    attention.RelPosEncXL: ExportedRelPosEncXL,
    pooling.Pooling1d: ExportedPooling1d, pooling.Pooling2d: ExportedPooling2d,
    **{original: type(f"Exported{original.__name__}", (forward, original), {})
       for original, forward in _RECURRENT.items()},
}
#: Keys are the fast equivalents where there are any, since ``exportable`` accelerates first.
EQUIVALENTS = {kind: swapped for original, swapped in _BY_ORIGINAL.items()
               for kind in (FASTER.get(original, original), with_lengths(original))}
