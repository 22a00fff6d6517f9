"""SpeechBrain's Conv2d and front-end blocks without transposes and copies, as channels stay last throughout."""

from __future__ import annotations

import torch
from speechbrain.lobes.models import convolution
from speechbrain.nnet import CNN, containers, normalization
from torch import Tensor, nn
from torch.nn import functional

from sbkit.nn.fast import fused
from sbkit.nn.fast.autocast import Context
from sbkit.nn.fast.dropout import Dropout, share
from sbkit.nn.fast.fused import Layer


class _ReflectPad(torch.autograd.Function):
    """Reflection padding of dimensions 1 and 2 of [B, T, F, C] in one pass."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, time: int, freq: int) -> Tensor:
        ctx.pads = time, freq
        b, t, f, c = x.shape
        out = x.new_empty(b, t + 2 * time, f + 2 * freq, c)
        out[:, time : time + t, freq : freq + f] = x
        for i in range(1, freq + 1):
            out[:, :, freq - i] = out[:, :, freq + i]
            out[:, :, freq + f - 1 + i] = out[:, :, freq + f - 1 - i]
        for i in range(1, time + 1):
            out[:, time - i] = out[:, time + i]
            out[:, time + t - 1 + i] = out[:, time + t - 1 - i]
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        time, freq = ctx.pads
        t, f = grad.shape[1] - 2 * time, grad.shape[2] - 2 * freq
        rows = grad[:, time : time + t]  # in place, since only the convolution after it has this gradient
        for i in range(1, time + 1):
            rows[:, i] += grad[:, time - i]
            rows[:, t - 1 - i] += grad[:, time + t - 1 + i]
        out = rows[:, :, freq : freq + f]
        for i in range(1, freq + 1):
            out[:, :, i] += rows[:, :, freq - i]
            out[:, :, f - 1 - i] += rows[:, :, freq + f - 1 + i]
        return out, None, None


class Conv2d(CNN.Conv2d):
    """``speechbrain.nnet.CNN.Conv2d``: [B, T, F] or [B, T, F, C] to [B, T', F', C']."""

    def forward(self, x: Tensor) -> Tensor:
        pads = self._pads()
        if pads is None or x.shape[1] <= pads[0] or x.shape[2] <= pads[1]:
            return super().forward(x)
        if self.unsqueeze:
            x = x[..., None]
        if any(pads):
            if torch.compiler.is_compiling() or x.is_meta:
                x = functional.pad(x.permute(0, 3, 1, 2), (pads[1], pads[1], pads[0], pads[0]), mode="reflect")
                x = x.permute(0, 2, 3, 1)
            else:
                x = _ReflectPad.apply(x, *pads)
        # The original convolves [B, C, F, T]; swapping T and F in the kernel instead moves no data.
        conv, stride = self.conv, self.stride[::-1]
        if conv.weight.shape[2:] == (1, 1):
            # Strides are applied by slicing: with strides and channels last, the backward of torch 2.11's oneDNN writes
            # out of bounds for this kernel size.
            x, stride = x[:, :: stride[0], :: stride[1]], (1, 1)
            if conv.groups == 1:
                return functional.linear(x, conv.weight.flatten(1), conv.bias)
            x = x.contiguous()
        out = functional.conv2d(x.permute(0, 3, 1, 2), conv.weight.transpose(2, 3), conv.bias, stride, 0,
                                self.dilation[::-1], conv.groups)
        return out.permute(0, 2, 3, 1)

    def _pads(self) -> tuple[int, int] | None:
        """Return the frames and bins to pad on each side; None if the original forward is needed."""
        plain = not (self.skip_transpose or self.swap or self.max_norm is not None)
        if not plain or self.padding not in ("same", "valid") or hasattr(self.conv, "parametrizations"):
            return None
        if self.padding == "valid":
            return 0, 0
        if self.padding_mode != "reflect":
            return None
        time, freq = (
            CNN.get_padding_elem(self.in_channels, self.stride[i], self.kernel_size[i], self.dilation[i])
            for i in (-1, -2)
        )
        return (time[0], freq[0]) if time[0] == time[1] and freq[0] == freq[1] else None


class ConvBlock(convolution.ConvBlock):
    """``ConvBlock``: [B, T, F] or [B, T, F, C] to [B, T', F', C']; fuses norm, activation and dropout on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        out = _through(self.convs, x)
        return self.drop(out + self.reduce_conv(x)) if self.reduce_conv else out


def _through(layers: Layer, x: Tensor) -> Tensor:
    if type(layers) is not containers.Sequential or not fused.plain(layers):
        return layers(x)
    rest = list(layers.values())
    while rest:
        normed = _normed(x, *rest[:3]) if len(rest) > 2 else None
        x, rest = (rest[0](x), rest[1:]) if normed is None else (normed, rest[3:])
    return x


def _normed(x: Tensor, norm: Layer, activation: Layer, drop: Layer) -> Tensor | None:
    """Apply norm, activation and dropout in one pass; None if the kernels don't support them."""
    kinds = type(norm), type(activation), type(drop)
    if kinds not in _FUSED or activation.inplace:
        return None
    dtype, p = fused.precision(x), share(drop)
    if dtype is None or p is None or not fused.plain(norm, norm.norm, activation, drop):
        return None
    fitting = fused.fits(norm.norm, x.shape[-2:])
    return fused.norm(x, norm.norm, dtype, activation.negative_slope, p) if fitting else None


_FUSED = {(normalization.LayerNorm, nn.LeakyReLU, kind) for kind in (nn.Dropout, Dropout)}
