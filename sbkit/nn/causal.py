"""A causal convolutional front end, with the same outputs on a stream as on whole utterances."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.fast import fused
from sbkit.nn.fast.dropout import Dropout


class CausalFrontEnd(nn.Module):
    """Features [B, T, F] to [B, T', F', C], as SpeechBrain's ``ConvolutionFrontEnd``, but only padded on the left.

    With two layers of stride 2, T' is T / 4, rounded up, and frame j sees features up to 4 j. :meth:`forward_step`
    computes the same of features that come in pieces.

    n_features : F
    channels : of each layer; F' is F divided by the stride (and rounded up) once for each
    kernel_size : frames, and features, that a layer sees; an odd number
    stride : of each layer, in time and in frequency
    dropout : share of each layer's outputs that are dropped in training

    >>> CausalFrontEnd(80)(torch.randn(2, 101, 80)).shape
    torch.Size([2, 26, 20, 32])
    """

    def __init__(self, n_features: int, channels: Sequence[int] = (32, 32), kernel_size: int = 3, stride: int = 2,
                 dropout: float = 0.1):
        super().__init__()
        if not channels or min(n_features, stride, *channels) < 1:
            raise ValueError("n_features, stride and each of channels must be 1 or more")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size is {kernel_size}, but must be an odd number, to have a middle in frequency")
        layers: list[_Layer] = []
        for inputs, outputs in zip((1, *channels), channels, strict=False):
            width = layers[-1].width if layers else n_features
            layers.append(_Layer(width, inputs, outputs, kernel_size, stride, dropout))
        self.layers = nn.ModuleList(layers)
        self._reach = [layer.reach for layer in layers]
        self.subsampling = stride ** len(layers)
        """Input frames per output frame."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, F] -> [B, T', F', C]."""
        return self.forward_step(x, self.state(x.shape[0], x))[0]

    def forward_step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the next frames of a stream: [B, T, F] and a state to [B, T', F', C] and the next state.

        T is a multiple of ``subsampling``, except in the last piece of a stream.
        """
        x = x[..., None]
        next_state = []
        for layer, before in zip(self.layers, state, strict=True):
            x, left = layer(x, before)
            next_state.append(left)
        return x, tuple(next_state)

    def state(self, batch: int, like: Tensor | None = None) -> tuple[Tensor, ...]:
        """Make the initial state, zeros: the last inputs [B, kernel_size - 1, F, C] of each layer.

        like : a tensor with its type and device; None: the weights
        """
        like = next(self.parameters()) if like is None else like
        return tuple(like.new_zeros(batch, *reach) for reach in self._reach)


class _Layer(nn.Module):
    """Convolution, layer norm, LeakyReLU and dropout: [B, T, F, C] and the frames before to [B, T', F', C'] and the
    frames before the next step."""

    def __init__(self, features: int, inputs: int, outputs: int, kernel_size: int, stride: int, dropout: float):
        super().__init__()
        self.width = (features - 1) // stride + 1
        """F'."""
        self.reach = kernel_size - 1, features, inputs
        """Shape of the frames before."""
        self.conv = nn.Conv2d(inputs, outputs, kernel_size, stride, padding=(0, kernel_size // 2))
        self.norm = nn.LayerNorm([self.width, outputs])
        self.activation = nn.LeakyReLU()
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([before.to(x.dtype), x], dim=1)
        left = x[:, x.shape[1] - self.reach[0]:]
        # A view [B, C, T, F] of memory with channels last: nothing is copied.
        y = functional.conv2d(x.permute(0, 3, 1, 2), self.conv.weight, self.conv.bias, self.conv.stride,
                              self.conv.padding).permute(0, 2, 3, 1)
        fast = fused.activated_norm(y, self.norm, self.activation, self.dropout)
        return (self.dropout(self.activation(self.norm(y))) if fast is None else fast), left
