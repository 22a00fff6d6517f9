"""SpeechBrain's recurrent layers and containers with lengths, so that an utterance's result doesn't depend on padding.

SpeechBrain's RNN, LSTM and GRU pack sequences, which makes a GPU wait for the host and can't be exported. Its light
GRUs take no lengths, and CRDNN and ``Sequential`` pass none on. Here a backward direction begins at each utterance's
own end. Parameters and checkpoint keys are the same: only classes are swapped, as in ``sbkit.nn.accelerate``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from speechbrain.nnet import RNN, containers
from speechbrain.utils.callchains import LENGTHS_ARG_NAMES
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.lengths import lengths_to_mask, takes_lengths

#: How SpeechBrain's encoders of Conformer and Transformer take lengths.
MASK = "src_key_padding_mask"


def _frames(lengths: Tensor, x: Tensor) -> Tensor:
    """Return the numbers of frames [B] of ``x`` [B, T, ...] for relative lengths [B]."""
    # As SpeechBrain, without the last incomplete frame after pooling; rounding in fp32 must not drop a whole one.
    return (lengths * x.shape[1] + 0.01).long()


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse the frames [B, T, D] of each utterance, whose padding stays where it is; ``lengths``: relative, [B]."""
    if lengths is None:
        return x.flip(1)
    time = torch.arange(x.shape[1], device=x.device)
    last = _frames(lengths, x)[:, None] - 1
    return x.gather(1, torch.where(time <= last, last - time, time)[..., None].expand(-1, -1, x.shape[2]))


_KERNELS: dict[str, Callable[..., Any]] = {  # torch's, which have no types
    "GRU": torch.gru, "LSTM": torch.lstm, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}


class _Torch(nn.Module):
    """One of torch's recurrent layers in SpeechBrain's wrapper; with lengths, it returns no final states."""

    rnn: nn.RNNBase

    def forward(self, x: Tensor, hx: Tensor | tuple[Tensor, Tensor] | None = None, lengths: Tensor | None = None
                ) -> tuple[Tensor, object]:
        rnn = self.rnn
        if lengths is None or hx is not None:
            output: tuple[Tensor, object] = super().forward(x, hx, lengths)
            return output
        if not rnn.bidirectional:  # padding comes after all that counts
            return super().forward(x)[0], None
        x = x.flatten(2)
        for layer in range(rnn.num_layers):
            if layer:
                x = functional.dropout(x, rnn.dropout, self.training)
            start = x.new_zeros(1, x.shape[0], rnn.hidden_size)
            onward = self._direction(x, start, f"_l{layer}")
            backward = reverse(self._direction(reverse(x, lengths), start, f"_l{layer}_reverse"), lengths)
            x = torch.cat([onward, backward], dim=2)
        return x, None

    def _direction(self, x: Tensor, start: Tensor, suffix: str) -> Tensor:
        """Run one direction of a layer: [B, T, D] and the initial state to [B, T, hidden_size].

        suffix : of its parameters' names
        """
        rnn = self.rnn
        names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if rnn.bias else ()))
        parameters = [getattr(rnn, name + suffix) for name in names]
        outputs, *_ = _KERNELS[rnn.mode](x, (start, start) if rnn.mode == "LSTM" else start, parameters,
                                         rnn.bias, 1, 0.0, self.training, False, True)
        return outputs


class _LightGRULayer(nn.Module):
    """A layer of a light GRU."""

    bidirectional: bool

    def forward(self, x: Tensor, hx: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        if lengths is None or not self.bidirectional:
            output: Tensor = super().forward(x, hx)
            return output
        self.bidirectional = False  # SpeechBrain's forward computes both directions as one batch, too
        try:
            onward, backward = super().forward(torch.cat([x, reverse(x, lengths)]), hx).chunk(2)
        finally:
            self.bidirectional = True
        return torch.cat([onward, reverse(backward, lengths)], dim=2)


class _LightGRU(nn.Module):
    """A stack of light GRU layers; with lengths, it returns no final states."""

    rnn: nn.ModuleList

    def forward(self, x: Tensor, hx: Tensor | None = None, lengths: Tensor | None = None) -> tuple[Tensor, object]:
        if lengths is None or hx is not None:
            output: tuple[Tensor, object] = super().forward(x, hx)
            return output
        x = x.flatten(2)
        for layer in self.rnn:
            x = layer(x, lengths=lengths)
        return x, None


class _Container(nn.Module):
    """A container that passes lengths on to each layer that takes them."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        for layer in _inside(self):
            name = lengths_name(layer)
            if name is None or lengths is None:
                x = layer(x)
            else:
                x = layer(x, **{name: _argument(name, lengths, x)})
            x = x[0] if isinstance(x, tuple) else x
        return x


_FORWARDS: dict[Any, type[nn.Module]] = {
    containers.Sequential.forward: _Container, containers.LengthsCapableSequential.forward: _Container,
    containers.ModuleList.forward: _Container,
    RNN.RNN.forward: _Torch, RNN.LSTM.forward: _Torch, RNN.GRU.forward: _Torch,
    RNN.LiGRU.forward: _LightGRU, RNN.LiGRU_Layer.forward: _LightGRULayer,
    RNN.SLiGRU.forward: _LightGRU, RNN.SLiGRU_Layer.forward: _LightGRULayer,
}


@functools.cache
def with_lengths(kind: type) -> type:
    """Return the class that replaces one of SpeechBrain's, or a class with the forward of one; or ``kind`` itself."""
    swapped = _FORWARDS.get(kind.forward) if issubclass(kind, nn.Module) else None
    return kind if swapped is None else type(kind.__name__, (swapped, kind), {"__module__": __name__})


def _inside(container: nn.Module) -> Iterable[nn.Module]:
    if isinstance(container, containers.ModuleList):
        return container.layers
    assert isinstance(container, containers.Sequential), "there are no others"
    return container.values()


def take_lengths(encoder: nn.Module) -> bool:
    """Swap the classes of a container and of its layers, or of a recurrent layer; returns whether it is a container.

    Layers inside of a user's module aren't swapped, because it may use their final states.
    """
    kind = _FORWARDS.get(type(encoder).forward)
    if kind is not None:
        replaced: Any = type(encoder)  # mypy takes a class of modules for a module, whose hash takes no object
        encoder.__class__ = with_lengths(replaced)
    layers: Iterable[nn.Module] = ()
    if isinstance(encoder, _Container):
        layers = _inside(encoder)
    elif isinstance(encoder, _LightGRU):
        layers = encoder.rnn
    for layer in layers:
        take_lengths(layer)
    return isinstance(encoder, _Container)


@functools.cache
def _name_in(forward: Callable[..., object]) -> str | None:
    parameters = inspect.signature(forward).parameters
    return next((name for name in (*LENGTHS_ARG_NAMES, MASK) if name in parameters), None)


def _argument(name: str, lengths: Tensor, x: Tensor) -> Tensor:
    """Return relative lengths as an argument of this name."""
    return lengths if name != MASK else ~lengths_to_mask(_frames(lengths, x), x.shape[1])


def lengths_name(layer: nn.Module) -> str | None:
    """Return the name of relative lengths, or of their mask, in a layer's forward, as in SpeechBrain's containers; None
    if it has none."""
    return _name_in(type(layer).forward)


def by_name(encoder: nn.Module) -> bool:
    """Whether the forward of an encoder is SpeechBrain's, or the equivalent of one: relative lengths go by name."""
    kinds = type(encoder).__mro__
    owner = next(kind.__module__.partition(".")[0] for kind in kinds if "forward" in vars(kind))
    derived = any(kind.__module__.startswith("speechbrain.") for kind in kinds)
    return derived and owner in ("speechbrain", "sbkit")


def sees_lengths(encoder: nn.Module) -> bool:
    """Whether an encoder without ``encode`` is called with lengths."""
    return lengths_name(encoder) is not None if by_name(encoder) else takes_lengths(encoder)


def call(encoder: nn.Module, x: Tensor, frames: Tensor, guard: int = 0, factor: int = 1) -> Tensor:
    """Call an encoder as it takes lengths: relative, by name, if it is SpeechBrain's; else numbers of frames [B].

    guard : frames of zeros to append, more than convolutions reach, so that an utterance ends as in a longer batch
    factor : pad to a multiple of this, so that relative lengths are the same after pooling
    """
    if guard or factor > 1:
        x = functional.pad(x, (0, 0, 0, guard + factor - 1))
        x = x[:, :x.shape[1] // factor * factor]
    name = lengths_name(encoder) if by_name(encoder) else None
    if name is not None:
        output = encoder(x, **{name: _argument(name, frames / x.shape[1], x)})
    elif sees_lengths(encoder):
        output = encoder(x, frames)
    else:
        output = encoder(x)
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states
