"""Parts of Conformer layers for training on a CPU: torch's matrix products, and ``sbkit.nn.native`` between them.

Each part is one autograd function with its own backward. Results and dropout masks equal those of the separate modules,
except that intermediate values are rounded less often under autocast.
"""

from __future__ import annotations

from ctypes import byref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sbkit.nn.fast import dropout
from sbkit.nn.fast.autocast import Context, without_autocast
from sbkit.nn.fast.norm import LayerNorm
from sbkit.nn.native.library import WIDEST, DropoutStruct, call, loaded

_once_differentiable: Any = once_differentiable  # torch's type for it does not fit ``backward``
_KNOWN = (torch.float32, torch.bfloat16)
Layer = Any  # a module whose attributes follow from checks of its class, which mypy can't see


def precision(x: Tensor) -> torch.dtype | None:
    """Return the type of activations if the fused parts can be used for ``x``, otherwise None."""
    if torch.compiler.is_compiling() or not loaded() or type(x) not in (Tensor, nn.Parameter):
        return None
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # torch does not type it
    if x.device.type != "cpu" or not torch.is_grad_enabled() or tracing or not x.numel():
        return None
    wanted = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    return wanted if wanted in _KNOWN and x.dtype in (torch.float32, wanted) else None


def plain(*modules: nn.Module) -> bool:
    """Whether modules have no hooks, so that their parameters may be used without calling them."""
    return not torch.nn.modules.module._has_any_global_hook() and not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks or "forward" in vars(m)
        for m in modules)


def fits(norm: nn.Module, shape: torch.Size) -> bool:
    """Whether a module is a layer norm over ``shape`` that the kernels support."""
    return (isinstance(norm, nn.LayerNorm) and type(norm) in (nn.LayerNorm, LayerNorm)
            and norm.normalized_shape == shape and shape.numel() <= WIDEST
            and norm.weight is not None and norm.bias is not None and single(norm.weight, norm.bias))


def single(*parameters: Tensor) -> bool:
    """Whether all are plain, contiguous float32 parameters on the CPU, so neither shards nor parametrized."""
    return all(type(p) is nn.Parameter and p.dtype == torch.float32 and p.device.type == "cpu" and p.is_contiguous()
               for p in parameters)


def masks(skip: Tensor | None, frames: tuple[int, ...]) -> bool:
    """Whether ``skip`` is None or a boolean mask of this shape that the kernels support."""
    return skip is None or (type(skip) is Tensor and skip.dtype == torch.bool and skip.device.type == "cpu"
                            and skip.shape == frames)


class _Drop:
    """The dropout of one activation; kernels compute its mask from random words in forward and again in backward."""

    def __init__(self, count: int, p: float):
        self.words = dropout.draw(count) if p else None
        if self.words is None:
            self.struct = DropoutStruct(None, None, 1, 0, 1.0)
        else:
            drop = dropout.levels(p)
            self.struct = DropoutStruct(self.words.one.data_ptr(), self.words.other.data_ptr(), self.words.odd,
                                        dropout.lowest(drop), dropout.factor(drop))

    @property
    def pointer(self) -> Any:  # ctypes' own
        return byref(self.struct)


_NO_DROPOUT = _Drop(0, 0.0)


class _Activation(NamedTuple):
    """The operations after a norm: SiLU if ``smooth``, otherwise a factor for negative values; then dropout."""

    smooth: bool = False
    slope: float = 1.0
    drop: _Drop = _NO_DROPOUT

    def options(self) -> tuple[Any, ...]:
        return self.smooth, self.slope, self.drop.pointer


_IDENTITY, _SILU = _Activation(), _Activation(smooth=True)


class _Rows:
    """Calls kernels on ``count`` rows of activations in ``dtype``, and allocates tensors for them."""

    def __init__(self, count: int, dtype: torch.dtype):
        self.count, self.dtype, self.threads = count, dtype, torch.get_num_threads()

    def __call__(self, name: str, columns: int, *arguments: Any) -> None:
        call(name, self.dtype, *arguments, self.count, columns, self.threads)

    def empty(self, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self.count, columns, dtype=dtype or self.dtype, device="cpu")

    def sums(self, columns: int) -> Tensor:
        """Allocate zeros for the threads of a kernel to sum into; the first row will hold the result."""
        return torch.zeros(self.threads, columns, dtype=torch.float32, device="cpu")

    def normalise(self, x: Tensor, norm: tuple[Tensor, Tensor, float],
                  after: _Activation = _IDENTITY) -> tuple[Tensor, ...]:
        """Normalise rows; returns them with the mean and reciprocal deviation that :meth:`unnormalise` needs."""
        columns, narrow = x.shape[-1], x.dtype != torch.float32
        out, mean, rstd = self.empty(columns), self.empty(1, torch.float32), self.empty(1, torch.float32)
        self("norm_forward", columns, x, narrow, *norm, *after.options(), out, mean, rstd)
        return out, mean, rstd

    def unnormalise(self, grad: Tensor, x: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor,
                    add: Tensor | None = None,
                    after: _Activation = _IDENTITY) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of x (plus ``add``), gain and shift."""
        columns, narrow = x.shape[-1], x.dtype != torch.float32
        out, sums = torch.empty_like(x), self.sums(2 * columns)
        self("norm_backward", columns, grad, x, narrow, gain, shift, *after.options(), mean, rstd, add, out, sums)
        return out, sums[0, :columns], sums[0, columns:]


def _weights(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [x.to(dtype) for x in tensors]


def _of_weight(grad: Tensor, x: Tensor, wanted: bool) -> Tensor | None:
    return (grad.t() @ x).float() if wanted else None


class _FeedForward(torch.autograd.Function):
    """x + weight * dropout(linear(dropout(silu(linear(norm(x))))))."""

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor,
                eps: float, inner: float, outer: float, weight: float, dtype: torch.dtype) -> Tensor:
        x, columns, wide = x.contiguous(), x.shape[-1], w1.shape[0]
        rows = _Rows(x.numel() // columns, dtype)
        normed, mean, rstd = rows.normalise(x, (gain, shift, eps))
        w1, w2 = _weights(dtype, w1, w2)
        hidden = normed @ w1.t()
        active, ctx.inner = rows.empty(wide), _Drop(rows.count * wide, inner)
        rows("silu_forward", wide, hidden, b1, ctx.inner.pointer, active)
        out, ctx.outer = torch.empty_like(x), _Drop(x.numel(), outer)
        rows("add_forward", columns, x, active @ w2.t(), b2, weight, None, ctx.outer.pointer, out)
        ctx.save_for_backward(x, gain, shift, mean, rstd, normed, hidden, b1, active, w1, w2)
        ctx.rows, ctx.weight = rows, weight
        return out

    @staticmethod
    @_once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, shift, mean, rstd, normed, hidden, b1, active, w1, w2 = ctx.saved_tensors
        rows, grad, columns, wide = ctx.rows, grad.contiguous(), x.shape[-1], w1.shape[0]
        of_added, of_b2 = rows.empty(columns), rows.sums(columns)
        rows("add_backward", columns, grad, ctx.weight, None, ctx.outer.pointer, of_added, of_b2)
        of_hidden, of_b1 = of_added @ w2, rows.sums(wide)
        rows("silu_backward", wide, of_hidden, hidden, b1, ctx.inner.pointer, of_b1)
        of_x, of_gain, of_shift = rows.unnormalise(of_hidden @ w1, x, gain, shift, mean, rstd, grad)
        return (of_x, of_gain, of_shift, _of_weight(of_hidden, normed, ctx.needs_input_grad[3]), of_b1[0],
                _of_weight(of_added, active, ctx.needs_input_grad[5]), of_b2[0], *[None] * 5)


class _Convolution(torch.autograd.Function):
    """x + dropout(linear(silu(norm(depthwise(glu(linear(norm(x)))))))); only x in skipped rows.

    The depthwise convolution sees no frame beyond a frame's chunk of ``chunk`` frames.
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, skip: Tensor | None, gain1: Tensor, shift1: Tensor, w1: Tensor, b1: Tensor,
                kernel: Tensor, bias: Tensor, gain2: Tensor, shift2: Tensor, w2: Tensor, b2: Tensor,
                eps: tuple[float, float], p: float, dtype: torch.dtype, chunk: int) -> Tensor:
        x, (b, t, columns) = x.contiguous(), x.shape
        rows = _Rows(b * t, dtype)
        normed, *of_norm1 = rows.normalise(x, (gain1, shift1, eps[0]))
        w1, w2 = _weights(dtype, w1.squeeze(-1), w2)
        kernel = kernel.squeeze(1).t().contiguous()
        wide = normed @ w1.t()
        gated, around = rows.empty(columns), rows.empty(columns)
        rows("glu_forward", columns, wide, b1, skip, gated)
        rows("depthwise_forward", columns, gated, kernel, bias, around, len(kernel), chunk, t)
        active, *of_norm2 = rows.normalise(around, (gain2, shift2, eps[1]), _SILU)
        out, ctx.drop = torch.empty_like(x), _Drop(x.numel(), p)
        rows("add_forward", columns, x, active @ w2.t(), b2, 1.0, skip, ctx.drop.pointer, out)
        ctx.save_for_backward(x, skip, gain1, shift1, *of_norm1, normed, w1, wide, b1, gated, kernel, around, gain2,
                              shift2, *of_norm2, active, w2)
        ctx.rows, ctx.chunk = rows, chunk
        return out

    @staticmethod
    @_once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, skip, gain1, shift1, mean1, rstd1, normed, w1, wide, b1, gated, kernel, around, gain2, shift2, mean2, rstd2,
         active, w2) = ctx.saved_tensors
        rows, grad, (_, t, columns) = ctx.rows, grad.contiguous(), x.shape
        of_added, of_b2 = rows.empty(columns), rows.sums(columns)
        rows("add_backward", columns, grad, 1.0, skip, ctx.drop.pointer, of_added, of_b2)
        of_around, of_gain2, of_shift2 = rows.unnormalise(of_added @ w2, around, gain2, shift2, mean2, rstd2,
                                                          after=_SILU)
        of_gated, of_taps = torch.empty_like(gated), rows.sums((len(kernel) + 1) * columns)
        rows("depthwise_backward", columns, of_around, gated, kernel, of_gated, of_taps, len(kernel), ctx.chunk, t)
        of_taps = of_taps[0].view(-1, columns)
        of_wide, of_b1 = torch.empty_like(wide), rows.sums(2 * columns)
        rows("glu_backward", columns, of_gated, wide, b1, skip, of_wide, of_b1)
        of_x, of_gain1, of_shift1 = rows.unnormalise(of_wide @ w1, x, gain1, shift1, mean1, rstd1, grad)
        of_w1 = _of_weight(of_wide, normed, ctx.needs_input_grad[4])
        return (of_x, None, of_gain1, of_shift1, None if of_w1 is None else of_w1[..., None], of_b1[0],
                of_taps[:-1].t()[:, None], of_taps[-1], of_gain2, of_shift2,
                _of_weight(of_added, active, ctx.needs_input_grad[10]), of_b2[0], *[None] * 4)


class _Attention(torch.autograd.Function):
    """x + linear(dropout(softmax(queries by keys)) by values), for queries, keys and values of norm(x).

    Positions are either rotary, by ``table``, or relative: ``positions`` [2 T - 1, D] for all distances, with the
    queries' biases ``near`` for keys and ``far`` for positions.
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, skip: Tensor | None, gain: Tensor, shift: Tensor, w1: Tensor,
                near: Tensor | None, far: Tensor | None, positions: Tensor | None, w2: Tensor, b2: Tensor,
                table: tuple[Tensor, Tensor] | None, mask: Tensor | None, heads: int, scale: float, eps: float,
                p: float, dtype: torch.dtype) -> Tensor:
        x, (b, t, columns) = x.contiguous(), x.shape
        rows, size = _Rows(b * t, dtype), columns // heads
        normed, mean, rstd = rows.normalise(x, (gain, shift, eps))
        w1, w2 = _weights(dtype, w1, w2)
        query, key, value = (rows.empty(columns).view(b * heads, t, size) for _ in range(3))
        away, places, distances = None, None, None
        if positions is None:
            assert table is not None, "without positions there is a table"
            rows("heads_forward", size, normed @ w1.t(), *table, scale, query, key, value, heads, t)
        else:
            away = rows.empty(columns).view(heads, b * t, size)
            rows("relative_forward", size, normed @ w1.t(), near, far, scale, query, away, key, value, heads, t)
            places = positions.to(dtype).view(-1, heads, size).permute(1, 2, 0).contiguous()
            distances = away @ places
        weights, pairs = query @ key.transpose(1, 2), _Rows(b * heads * t, dtype)
        dropped, drop = torch.empty_like(weights), _Drop(weights.numel(), p)
        pairs("softmax_forward", t, weights, distances, skip, mask, drop.pointer, dropped, heads)
        attended = (dropped @ value).view(b, heads, t, size).transpose(1, 2).reshape(-1, columns)
        out = torch.empty_like(x)
        rows("add_forward", columns, x, attended @ w2.t(), b2, 1.0, None, _NO_DROPOUT.pointer, out)
        ctx.save_for_backward(x, gain, shift, mean, rstd, normed, w1, query, away, places, key, value, weights,
                              attended, w2)
        ctx.rows, ctx.pairs, ctx.drop, ctx.scale, ctx.heads, ctx.table = rows, pairs, drop, scale, heads, table
        return out

    @staticmethod
    @_once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, gain, shift, mean, rstd, normed, w1, query, away, places, key, value, weights, attended,
         w2) = ctx.saved_tensors
        rows, heads, grad, (b, t, columns) = ctx.rows, ctx.heads, grad.contiguous(), x.shape
        size = columns // heads
        of_added, of_b2 = rows.empty(columns), rows.sums(columns)
        rows("add_backward", columns, grad, 1.0, None, _NO_DROPOUT.pointer, of_added, of_b2)
        of_attended = (of_added @ w2).view(b, t, heads, size).transpose(1, 2).reshape(-1, t, size)
        of_scores, dropped = of_attended @ value.transpose(1, 2), torch.empty_like(weights)
        of_distances = None if away is None else away.new_empty(heads, b * t, 2 * t - 1)
        ctx.pairs("softmax_backward", t, of_scores, weights, ctx.drop.pointer, dropped, of_distances, heads)
        of_query, of_key = of_scores @ key, of_scores.transpose(1, 2) @ query
        of_value, of_all = dropped.transpose(1, 2) @ of_attended, rows.empty(3 * columns)
        of_relative: tuple[Tensor | None, ...] = None, None, None
        if of_distances is None:
            rows("heads_backward", size, of_query, of_key, of_value, *ctx.table, ctx.scale, of_all, heads, t)
        else:
            of_away, of_biases = of_distances @ places.transpose(1, 2), rows.sums(2 * columns)
            rows("relative_backward", size, of_query, of_away, of_key, of_value, ctx.scale, of_all, of_biases, heads, t)
            of_places = away.transpose(1, 2) @ of_distances
            of_relative = (of_biases[0, :columns], of_biases[0, columns:], of_places.permute(2, 0, 1).flatten(1))
        of_x, of_gain, of_shift = rows.unnormalise(of_all @ w1, x, gain, shift, mean, rstd, grad)
        return (of_x, None, of_gain, of_shift, _of_weight(of_all, normed, ctx.needs_input_grad[4]), *of_relative,
                _of_weight(of_added, attended, ctx.needs_input_grad[8]), of_b2[0], *[None] * 7)


class _Norm(torch.autograd.Function):
    """Layer norm over the dimensions of ``gain``, then an activation and dropout, with outputs in ``dtype``."""

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, gain: Tensor, shift: Tensor, eps: float, slope: float, p: float,
                dtype: torch.dtype) -> Tensor:
        x, shape = x.contiguous(), x.shape
        flat = x.view(-1, gain.numel())
        ctx.rows, ctx.after = _Rows(len(flat), dtype), _Activation(False, slope, _Drop(x.numel(), p))
        out, *kept = ctx.rows.normalise(flat, (gain, shift, eps), ctx.after)
        ctx.save_for_backward(flat, gain, shift, *kept)
        return out.view(shape)

    @staticmethod
    @_once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        of_x, *of_norm = ctx.rows.unnormalise(grad.contiguous(), *saved, after=ctx.after)
        return of_x.view(grad.shape), *(sums.view(saved[1].shape) for sums in of_norm), *[None] * 4


def attention(x: Tensor, skip: Tensor | None, mask: Tensor | None, before: nn.LayerNorm, mha: Layer, p: float,
              dtype: torch.dtype, table: tuple[Tensor, Tensor] | None = None, near: Tensor | None = None,
              far: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """Compute x plus self-attention of its norm, with rotary positions, or with relative ones.

    skip : [B, T], True for frames that are not attended to
    mask : [T, T], True in a frame's row for frames that it does not attend to
    table : cosines and sines [T, size] in fp32, in SpeechBrain's layout, of rotary positions
    near, far : SpeechBrain's ``pos_bias_u`` and ``pos_bias_v`` [D], of relative positions
    positions : [2 T - 1, D], the output of the layer for relative positions
    """
    second = mha.out_proj
    return _Attention.apply(x, _bytes(skip), before.weight, before.bias, mha.in_proj_weight, near, far, positions,
                            second.weight, second.bias, table, _bytes(mask), mha.num_heads, mha.scale, before.eps, p,
                            dtype)


def _bytes(skip: Tensor | None) -> Tensor | None:
    return None if skip is None else skip.contiguous().view(torch.uint8)


def norm(x: Tensor, layer: nn.LayerNorm, dtype: torch.dtype, slope: float = 1.0, p: float = 0.0) -> Tensor:
    """Compute the layer norm of x; then multiply negative values by ``slope`` and apply dropout ``p``."""
    return _Norm.apply(x, layer.weight, layer.bias, layer.eps, slope, p, dtype)


def activated_norm(x: Tensor, layer: nn.LayerNorm, activation: nn.LeakyReLU, drop: nn.Dropout) -> Tensor | None:
    """Compute the layer norm of x over its last two dimensions, then the activation and dropout, in one pass; None if
    the kernels don't support them."""
    dtype, p = precision(x), dropout.share(drop)
    if dtype is None or p is None or not plain(layer, activation, drop) or not fits(layer, x.shape[-2:]):
        return None
    return norm(x, layer, dtype, activation.negative_slope, p)


def feed_forward(x: Tensor, layer: nn.LayerNorm, first: nn.Linear, second: nn.Linear, inner: float, outer: float,
                 weight: float, dtype: torch.dtype) -> Tensor:
    """Compute x plus ``weight`` times a feed-forward block of its norm, with dropout ``inner`` and ``outer``."""
    return _FeedForward.apply(x, layer.weight, layer.bias, first.weight, first.bias, second.weight, second.bias,
                              layer.eps, inner, outer, weight, dtype)


def convolution(x: Tensor, skip: Tensor | None, before: nn.LayerNorm, first: nn.Conv1d, around: nn.Conv1d,
                behind: nn.LayerNorm, second: nn.Linear, p: float, dtype: torch.dtype,
                chunk: int | None = None) -> Tensor:
    """Compute x plus a Conformer's convolution block of its norm; only x where ``skip`` [B, T, 1] is True.

    chunk : frames of a chunk, which see nothing beyond its end; None: the whole utterance
    """
    return _Convolution.apply(x, _bytes(skip), before.weight, before.bias, first.weight, first.bias, around.weight,
                              around.bias, behind.weight, behind.bias, second.weight, second.bias,
                              (before.eps, behind.eps), p, dtype, chunk or x.shape[1])
