"""Equivalents of SpeechBrain's recurrent and pooling layers that can be exported, for any number of frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from speechbrain.nnet import RNN, pooling
from torch import Tensor, nn

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
        """Compute what the previous state adds to an input."""
        return self.u(before)

    def forward(self, x: Tensor, hx: None = None) -> Tensor:
        batch = x.shape[0]
        if self.bidirectional:
            x = torch.cat([x, x.flip(1)])
        given = self.norm(self.w(x).flatten(0, 1)).unflatten(0, (x.shape[0], x.shape[1]))

        def step(before: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
            candidate, gate = (now + self._recurrent(before)).chunk(2, 1)
            gate = torch.sigmoid(gate)
            after = gate * before + (1 - gate) * self.act(candidate)
            return after, after.clone()

        states = _scan(step, self.h_init.expand(x.shape[0], -1).contiguous(), given)
        return torch.cat([states[:batch], states[batch:].flip(1)], dim=2) if self.bidirectional else states


class ExportedLiGRULayer(_Light, RNN.LiGRU_Layer):
    """``LiGRU_Layer``: [B, T, D] -> [B, T, H]."""


class ExportedSLiGRULayer(_Light, RNN.SLiGRU_Layer):
    """``SLiGRU_Layer``: [B, T, D] -> [B, T, H]."""

    layer_norm: nn.Module

    def _recurrent(self, before: Tensor) -> Tensor:
        return self.layer_norm(super()._recurrent(before))


class _LightStack:
    """A stack of light GRU layers; unlike the original's, its forward returns None for the final states."""

    rnn: nn.ModuleList

    def forward(self, x: Tensor, hx: None = None) -> tuple[Tensor, None]:
        x = x.flatten(2)
        for layer in self.rnn:
            x = layer(x, hx=None)
        return x, None


class ExportedLiGRU(_LightStack, RNN.LiGRU):
    """``LiGRU``: [B, T, D] -> [B, T, H]."""


class ExportedSLiGRU(_LightStack, RNN.SLiGRU):
    """``SLiGRU``: [B, T, D] -> [B, T, H]."""


_State = tuple[Tensor, ...]


def _lstm(given: Tensor, before: Tensor, state: _State) -> _State:
    i, f, g, o = (given + before).chunk(4, 1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(given: Tensor, before: Tensor, state: _State) -> _State:
    (given_r, given_z, given_n), (r, z, n) = given.chunk(3, 1), before.chunk(3, 1)
    keep = torch.sigmoid(given_z + z)
    return (keep * state[0] + (1 - keep) * torch.tanh(given_n + torch.sigmoid(given_r + r) * n),)


def _tanh(given: Tensor, before: Tensor, state: _State) -> _State:
    return (torch.tanh(given + before),)


def _relu(given: Tensor, before: Tensor, state: _State) -> _State:
    return (torch.relu(given + before),)


_CELLS: dict[str, tuple[Callable[[Tensor, Tensor, _State], _State], int]] = {
    "LSTM": (_lstm, 2), "GRU": (_gru, 1), "RNN_TANH": (_tanh, 1), "RNN_RELU": (_relu, 1),
}


class _TorchRecurrent:
    """One of torch's recurrent layers in SpeechBrain's wrapper: [B, T, D] -> [B, T, H]; no final states."""

    rnn: nn.RNNBase

    def forward(self, x: Tensor, hx: None = None, lengths: None = None) -> tuple[Tensor, None]:
        x = x.flatten(2)
        for layer in range(self.rnn.num_layers):
            ways = [_one_way(self.rnn, f"_l{layer}", x)]
            if self.rnn.bidirectional:
                ways.append(_one_way(self.rnn, f"_l{layer}_reverse", x.flip(1)).flip(1))
            x = torch.cat(ways, dim=-1)
        return x, None


def _one_way(rnn: nn.RNNBase, name: str, x: Tensor) -> Tensor:
    cell, states = _CELLS[rnn.mode]
    weight, bias = getattr(rnn, f"weight_hh{name}"), getattr(rnn, f"bias_hh{name}", None)
    given = nn.functional.linear(x, getattr(rnn, f"weight_ih{name}"), getattr(rnn, f"bias_ih{name}", None))

    def step(state: _State, now: Tensor) -> tuple[_State, Tensor]:
        state = cell(now, nn.functional.linear(state[0], weight, bias), state)
        return state, state[0].clone()

    start = x.new_zeros(x.shape[0], rnn.hidden_size)
    return _scan(step, tuple(start.clone() for _ in range(states)), given)


class ExportedRNN(_TorchRecurrent, RNN.RNN):
    """``RNN``: [B, T, D] -> [B, T, H]."""


class ExportedLSTM(_TorchRecurrent, RNN.LSTM):
    """``LSTM``: [B, T, D] -> [B, T, H]."""


class ExportedGRU(_TorchRecurrent, RNN.GRU):
    """``GRU``: [B, T, D] -> [B, T, H]."""


def _pool(x: Tensor, axis: int, size: int, kind: str) -> Tensor:
    """Pool an axis in windows of ``size``; an incomplete last window is dropped."""
    count = x.shape[axis] // size
    x = x.narrow(axis, 0, count * size).unflatten(axis, (count, size))
    return x.amax(axis + 1) if kind == "max" else x.mean(axis + 1)


def _plain(layer: nn.Module) -> bool:
    """Whether pooling windows neither overlap nor reach beyond the edges."""
    pads = layer.padding if isinstance(layer.padding, tuple) else (layer.padding,)
    dilation = getattr(layer, "dilation", 1)
    return (layer.stride == layer.kernel_size and not any(pads) and not layer.ceil_mode
            and all(each == 1 for each in (dilation if isinstance(dilation, tuple) else (dilation,))))


class ExportedPooling1d(pooling.Pooling1d):
    """``Pooling1d`` by reshaping, since torch's pooling fixes in the graph whether the number of frames is even."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.pool_layer
        if not _plain(layer):
            return super().forward(x)
        size = layer.kernel_size[-1] if isinstance(layer.kernel_size, tuple) else layer.kernel_size
        return _pool(x, self.pool_axis, size, "max" if "Max" in type(layer).__name__ else "mean")


class ExportedPooling2d(pooling.Pooling2d):
    """``Pooling2d`` by reshaping, for the same reason as :class:`ExportedPooling1d`."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.pool_layer
        if not _plain(layer):
            return super().forward(x)
        sizes = layer.kernel_size if isinstance(layer.kernel_size, (tuple, list)) else (layer.kernel_size,) * 2
        for axis, size in zip(self.pool_axis, sizes, strict=True):
            x = _pool(x, axis, size, "max" if self.pool_type != "avg" else "mean")
        return x


EQUIVALENTS: dict[type, type] = {
    RNN.LiGRU: ExportedLiGRU, RNN.LiGRU_Layer: ExportedLiGRULayer, RNN.SLiGRU: ExportedSLiGRU,
    RNN.SLiGRU_Layer: ExportedSLiGRULayer, RNN.RNN: ExportedRNN, RNN.LSTM: ExportedLSTM, RNN.GRU: ExportedGRU,
    pooling.Pooling1d: ExportedPooling1d, pooling.Pooling2d: ExportedPooling2d,
}
