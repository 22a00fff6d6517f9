"""SpeechBrain's feature layers without rebuilding tables, or copying them to the device, in each call; its Conv2d and
front-end blocks without transposes and copies, with channels last throughout."""

from __future__ import annotations

from typing import Any

import torch
from speechbrain.lobes import features as lobes
from speechbrain.lobes.models import convolution
from speechbrain.nnet import CNN, containers, normalization
from speechbrain.processing import features
from speechbrain.utils.autocast import fwd_default_precision
from speechbrain.utils.distributed import ddp_all_reduce
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.nn.fast import fused
from sbkit.nn.fast.autocast import Context
from sbkit.nn.fast.dropout import Dropout
from sbkit.nn.fast.fused import Layer
from sbkit.nn.finite import all_finite


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
        out = x
        layers = [self.convs]
        if type(self.convs) is containers.Sequential and fused.known(self.convs):
            layers = list(self.convs.values())
        while layers:
            normed = _fused_norm(out, layers[:3])
            if normed is not None:
                out = normed
                layers = layers[3:]
            else:
                out = layers[0](out)
                layers = layers[1:]
        return self.drop(out + self.reduce_conv(x)) if self.reduce_conv else out


def _fused_norm(x: Tensor, layers: Layer) -> Tensor | None:
    """Apply a norm, an activation and a dropout in one pass; None if these aren't such layers, or kernels can't."""
    if tuple(map(type, layers)) not in _FUSED:
        return None
    norm, activation, drop = layers
    if activation.inplace or not fused.known(norm):
        return None
    return fused.activated_norm(x, norm.norm, activation, drop)


_FUSED = {(normalization.LayerNorm, nn.LeakyReLU, kind) for kind in (nn.Dropout, Dropout)}


class Fbank(lobes.Fbank):
    """``Fbank``: [B, S] to [B, T, features]; computes the power spectrum in two passes instead of four."""

    @fwd_default_precision(cast_inputs=torch.float32)
    def forward(self, wav: Tensor) -> Tensor:
        squares = self.compute_STFT(wav).square()
        fbanks = self.compute_fbanks(squares.select(-1, 0) + squares.select(-1, 1))
        if self.deltas:
            first = self.compute_deltas(fbanks)
            fbanks = torch.cat([fbanks, first, self.compute_deltas(first)], dim=2)
        return self.context_window(fbanks) if self.context else fbanks


class STFT(features.STFT):
    """``STFT``: [B, S] to [B, T, F, 2]; keeps its window on the device of the signals."""

    window: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.window.device != x.device:
            self.window = self.window.to(x.device)
        return super().forward(x)


class Filterbank(features.Filterbank):
    """``Filterbank``: [B, T, F] to [B, T, mels]; computes fixed filters only once."""

    def forward(self, spectrogram: Tensor) -> Tensor:
        changing = not self.freeze or (self.param_rand_factor != 0 and self.training)
        if changing or spectrogram.ndim != 3:
            return super().forward(spectrogram)
        filters = self.__dict__.get("_filters")
        if filters is None or filters.device != spectrogram.device:
            shape = self.all_freqs_mat.shape
            filters = self._create_fbank_matrix(self.f_central[:, None].expand(shape), self.band[:, None].expand(shape))
            filters = self.__dict__["_filters"] = filters.to(spectrogram.device)
        fbanks = torch.matmul(spectrogram, filters)
        return self._amplitude_to_DB(fbanks) if self.log_mel else fbanks


class InputNormalization(features.InputNormalization):
    """``InputNormalization``: [B, T, F] to the same; updates its statistics without the original's two host syncs."""

    glob_mean: Tensor
    glob_std: Tensor
    count: int | Tensor
    _counting: Tensor | None = None

    def forward(self, x: Tensor, lengths: Tensor | None = None, epoch: int | None = None) -> Tensor:
        if self.norm_type == "global":
            # Not buffers: after loading a checkpoint they may be on another device.
            self.glob_mean, self.glob_std = self.glob_mean.to(x.device), self.glob_std.to(x.device)
            if not self.glob_mean.numel() and not self._should_update(epoch):
                raise SbkitError("no-statistics",
                                 "InputNormalization with norm_type global has no statistics: it wasn't "
                                 "trained, and no checkpoint has them",
                                 hint="train first, with it in the checkpointer's recoverables")
        return super().forward(x, lengths, epoch)

    def counting(self, x: Tensor, lengths: Tensor | None, rows: Tensor) -> Tensor:
        """Normalise ``x`` and add only ``rows`` [B] bool to the statistics; takes part in the ranks' all-reduce."""
        self._counting = rows
        try:
            return self(x, lengths)
        finally:
            self._counting = None

    def _update_global_stats(self, x: Tensor, mask: Tensor) -> None:
        dims = (0, self.length_dim)
        wide = x.float()
        if self._counting is not None:
            mask = mask & self._counting.view(-1, *[1] * (mask.dim() - 1))
        number = _over_ranks(mask.sum().float())
        divisor = number.clamp(min=1)  # possibly no rank counts anything
        mean = _over_ranks((wide * mask).sum(dims)) / divisor
        deviations = (wide - mean.unsqueeze(0).unsqueeze(self.length_dim)) * mask
        variance = _over_ranks(deviations.square().sum(dims)) / divisor
        if not self.glob_mean.numel():
            self.glob_mean = torch.zeros_like(mean)
            self.glob_std = torch.ones_like(mean)
        mean_before = self.glob_mean
        deviation_before = self.glob_std
        count = self.count + number.double()
        share = (number / count.clamp(min=1)).float()
        between = share * (1 - share) * (mean - mean_before).square()
        new_mean = torch.lerp(mean_before, mean, share)
        new_deviation = (torch.lerp(deviation_before.square(), variance, share) + between).sqrt()
        finite = all_finite(new_mean, new_deviation)
        self.glob_mean = torch.where(finite, new_mean, mean_before)
        self.glob_std = torch.where(finite, new_deviation, deviation_before)
        self.count = torch.where(finite, count, self.count)

    def _statistics_dict(self) -> dict[str, Any]:
        return {**super()._statistics_dict(), "count": int(self.count)}


class FixedNormalization(InputNormalization):
    """``InputNormalization`` with ``norm_type: global`` and statistics that are known before training, so that ranks
    needn't exchange any."""

    counting = None  # type: ignore[assignment]  # no row is counted

    def _should_update(self, epoch: int | None) -> bool:
        return False

    def forward(self, x: Tensor, lengths: Tensor | None = None, epoch: int | None = None) -> Tensor:
        if self.avoid_padding_norm or not self.std_norm:
            return super().forward(x, lengths, epoch)
        self.glob_mean, self.glob_std = self.glob_mean.to(x.device), self.glob_std.to(x.device)
        return (x - self.glob_mean) / self.glob_std.clamp(min=self.epsilon)


def _over_ranks(value: Tensor) -> Tensor:
    return ddp_all_reduce(value, ReduceOp.SUM)
