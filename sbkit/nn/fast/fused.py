"""Parts of Conformer layers for training on a CPU: torch's matrix products, and ``sbkit.nn.native`` between them.

Each part is one autograd function with its own backward. Results and dropout masks equal those of the separate modules,
except that intermediate values are rounded less often under autocast.
"""

from __future__ import annotations

import math
from ctypes import byref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sbkit.nn.fast import dropout
from sbkit.nn.fast.autocast import Context, without_autocast
from sbkit.nn.fast.norm import LayerNorm
from sbkit.nn.native.library import WIDEST, DropoutStruct, call, loaded

_once_differentiable: Any = once_differentiable  # torch's type for it does not fit ``backward``
_KNOWN = (torch.float32, torch.bfloat16)
_NORMS = (nn.LayerNorm, LayerNorm)
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


def known(*layers: Layer) -> bool:
    """Whether kernels may use layers' parameters without calling the layers.

    They have no hooks, and all parameters, biases included, are contiguous float32 ones on the CPU, so neither shards
    nor parametrized.
    """
    for layer in layers:
        if (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
                or "forward" in layer.__dict__):
            return False
        for p in layer._parameters.values():
            if type(p) is not nn.Parameter or p.dtype != torch.float32 or not p.is_cpu or not p.is_contiguous():
                return False
    return not torch.nn.modules.module._has_any_global_hook()


def fits(norm: Layer, shape: torch.Size) -> bool:
    """Whether a layer is a known layer norm over ``shape`` that the kernels support."""
    return bool(type(norm) in _NORMS and norm.normalized_shape == shape and shape.numel() <= WIDEST and known(norm))


def masks(skip: Tensor | None, frames: tuple[int, ...]) -> bool:
    """Whether ``skip`` is None or a boolean mask of this shape that the kernels support."""
    return skip is None or (type(skip) is Tensor and skip.dtype == torch.bool and skip.is_cpu and skip.shape == frames)


def _bytes(skip: Tensor | None) -> Tensor | None:
    return None if skip is None else skip.contiguous().view(torch.uint8)


#: Rows of matrices in products come in multiples of this at least.
_LEAST_UNIT = 64
_NO_DROPOUT = byref(DropoutStruct(None, None, 1, 0, 1.0))
#: What a kernel does after a norm: SiLU or not, the factor of negative values, dropout.
_IDENTITY, _SILU = (False, 1.0, _NO_DROPOUT), (True, 1.0, _NO_DROPOUT)


def _drop(count: int, p: float) -> Any:  # ctypes' own
    """Make the dropout of one activation, whose mask kernels compute from random words, in backward once more."""
    if not p:
        return _NO_DROPOUT
    words = dropout.draw(count)
    drop = dropout.levels(p)
    struct = DropoutStruct(words.one.data_ptr(), words.other.data_ptr(), words.odd, dropout.lowest(drop),
                           dropout.factor(drop))
    struct.words = words  # keeps their memory as long as the struct
    return byref(struct)


def _filled_up(rows: int, dtype: torch.dtype) -> int:
    """Return how many rows a matrix in a product gets, of which those beyond ``rows`` are 0.

    For a product in bf16 of a size that it has not seen, oneDNN compiles a kernel, which takes as long as some products
    of a small step. Hardly two steps have the same number of frames, so a quarter of a step went there. Of filled up
    sizes there are few. MKL, which computes products in fp32, compiles nothing.
    """
    if dtype is not torch.bfloat16:
        return rows
    unit = max(_LEAST_UNIT, 1 << (rows.bit_length() - 4))  # at most an eighth of the rows
    return math.ceil(rows / unit) * unit


def _matrix(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Allocate a matrix for a product; a kernel writes its first ``rows``, and the others are 0."""
    filled_up = _filled_up(rows, dtype)
    matrix = like.new_empty(filled_up, columns, dtype=dtype)
    if filled_up > rows:
        matrix[rows:].zero_()
    return matrix


def _normalise(x: Tensor, gain: Tensor, shift: Tensor, eps: float, dtype: torch.dtype,
               after: tuple[Any, ...] = _IDENTITY, for_product: bool = True) -> tuple[Tensor, ...]:
    """Normalise rows: [..., D] to [N, D] in ``dtype``, with the mean and the reciprocal deviation of each.

    for_product : whether the result is a ``_matrix``, with rows of 0 after these
    """
    columns = gain.numel()
    count = x.numel() // columns
    out = _matrix(x, count, columns, dtype) if for_product else x.new_empty(count, columns, dtype=dtype)
    mean, rstd = x.new_empty(2, count, dtype=torch.float32)
    call("norm_forward", dtype, x, x.dtype != torch.float32, gain, shift, eps, *after, out, mean, rstd, count, columns,
         torch.get_num_threads())
    return out, mean, rstd


def _unnormalise(grad: Tensor, x: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor,
                 add: Tensor | None = None, after: tuple[Any, ...] = _IDENTITY) -> tuple[Tensor, ...]:
    """Return the gradients of x (plus ``add``), gain and shift."""
    columns = gain.numel()
    out = torch.empty_like(x)
    sums = _sums(x, 2 * columns)
    call("norm_backward", grad.dtype, grad, x, x.dtype != torch.float32, gain, shift, *after, mean, rstd, add, out,
         sums, x.numel() // columns, columns, len(sums))
    return out, sums[0, :columns].view(gain.shape), sums[0, columns:].view(gain.shape)


def _sums(like: Tensor, columns: int) -> Tensor:
    """Allocate zeros for the threads of a kernel to sum into; the first row will hold the result."""
    return like.new_zeros(torch.get_num_threads(), columns, dtype=torch.float32)


def _of_weight(grad: Tensor, x: Tensor, wanted: bool) -> Tensor | None:
    return (grad.t() @ x).float() if wanted else None


class FeedForwardPart(torch.autograd.Function):
    """x + weight * dropout(linear(dropout(silu(linear(norm(x))))))."""

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor,
                eps: float, inner: float, outer: float, weight: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        columns = x.shape[-1]
        threads = torch.get_num_threads()
        normed, mean, rstd = _normalise(x, gain, shift, eps, dtype)
        w1 = w1.to(dtype)
        w2 = w2.to(dtype)
        rows = len(mean)
        hidden = normed @ w1.t()
        width = hidden.shape[1]
        active = _matrix(x, rows, width, dtype)
        ctx.inner = _drop(rows * width, inner)
        call("silu_forward", dtype, hidden, b1, ctx.inner, active, rows, width, threads)
        out = torch.empty_like(x)
        ctx.outer = _drop(x.numel(), outer)
        ctx.weight = weight
        call("add_forward", dtype, x, active @ w2.t(), b2, weight, None, ctx.outer, out, rows, columns, threads)
        ctx.save_for_backward(x, gain, shift, mean, rstd, normed, hidden, b1, active, w1, w2)
        return out

    @staticmethod
    @_once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, shift, mean, rstd, normed, hidden, b1, active, w1, w2 = ctx.saved_tensors
        dtype = normed.dtype
        rows, columns, width = len(mean), x.shape[-1], hidden.shape[1]
        grad = grad.contiguous()
        of_added = _matrix(x, rows, columns, dtype)
        of_b2 = _sums(x, columns)
        call("add_backward", dtype, grad, ctx.weight, None, ctx.outer, of_added, of_b2, rows, columns, len(of_b2))
        of_hidden = of_added @ w2
        of_b1 = _sums(x, width)
        call("silu_backward", dtype, of_hidden, hidden, b1, ctx.inner, of_b1, rows, width, len(of_b1))
        of_x, of_gain, of_shift = _unnormalise(of_hidden @ w1, x, gain, shift, mean, rstd, grad)
        return (of_x, of_gain, of_shift, _of_weight(of_hidden, normed, ctx.needs_input_grad[3]), of_b1[0],
                _of_weight(of_added, active, ctx.needs_input_grad[5]), of_b2[0], *[None] * 5)


class ConvolutionPart(torch.autograd.Function):
    """x + dropout(linear(silu(norm(depthwise(glu(linear(norm(x)))))))); only x where ``skip`` [B, T, 1] is True.

    The depthwise convolution sees no frame beyond a frame's chunk of ``chunk`` frames.
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, skip: Tensor | None, gain1: Tensor, shift1: Tensor, w1: Tensor, b1: Tensor,
                kernel: Tensor, bias: Tensor, gain2: Tensor, shift2: Tensor, w2: Tensor, b2: Tensor,
                eps: tuple[float, float], p: float, dtype: torch.dtype, chunk: int) -> Tensor:
        b, t, columns = x.shape
        x = x.contiguous()
        skip = _bytes(skip)
        rows = b * t, columns, torch.get_num_threads()
        normed, *of_norm1 = _normalise(x, gain1, shift1, eps[0], dtype)
        w1 = w1.squeeze(-1).to(dtype)
        w2 = w2.to(dtype)
        kernel = kernel.squeeze(1).t().contiguous()
        wide = normed @ w1.t()
        gated, around = normed.new_empty(2, b * t, columns)
        call("glu_forward", dtype, wide, b1, skip, gated, *rows)
        call("depthwise_forward", dtype, gated, kernel, bias, around, len(kernel), chunk, t, *rows)
        active, *of_norm2 = _normalise(around, gain2, shift2, eps[1], dtype, _SILU)
        out = torch.empty_like(x)
        ctx.drop = _drop(x.numel(), p)
        ctx.chunk = chunk
        call("add_forward", dtype, x, active @ w2.t(), b2, 1.0, skip, ctx.drop, out, *rows)
        ctx.save_for_backward(x, skip, gain1, shift1, *of_norm1, normed, w1, wide, b1, gated, kernel, around, gain2,
                              shift2, *of_norm2, active, w2)
        return out

    @staticmethod
    @_once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, skip, gain1, shift1, mean1, rstd1, normed, w1, wide, b1, gated, kernel, around, gain2, shift2, mean2, rstd2,
         active, w2) = ctx.saved_tensors
        dtype = normed.dtype
        b, t, columns = x.shape
        grad = grad.contiguous()
        of_added = _matrix(x, b * t, columns, dtype)
        of_b2 = _sums(x, columns)
        rows = b * t, columns, len(of_b2)
        call("add_backward", dtype, grad, 1.0, skip, ctx.drop, of_added, of_b2, *rows)
        of_around, of_gain2, of_shift2 = _unnormalise(of_added @ w2, around, gain2, shift2, mean2, rstd2, after=_SILU)
        of_gated = torch.empty_like(gated)
        of_taps = _sums(x, (len(kernel) + 1) * columns)
        call("depthwise_backward", dtype, of_around, gated, kernel, of_gated, of_taps, len(kernel), ctx.chunk, t, *rows)
        of_taps = of_taps[0].view(-1, columns)
        of_wide = _matrix(x, b * t, 2 * columns, dtype)
        of_b1 = _sums(x, 2 * columns)
        call("glu_backward", dtype, of_gated, wide, b1, skip, of_wide, of_b1, *rows)
        of_x, of_gain1, of_shift1 = _unnormalise(of_wide @ w1, x, gain1, shift1, mean1, rstd1, grad)
        of_w1 = _of_weight(of_wide, normed, ctx.needs_input_grad[4])
        return (of_x, None, of_gain1, of_shift1, None if of_w1 is None else of_w1[..., None], of_b1[0],
                of_taps[:-1].t()[:, None], of_taps[-1], of_gain2, of_shift2,
                _of_weight(of_added, active, ctx.needs_input_grad[10]), of_b2[0], *[None] * 4)


class AttentionPart(torch.autograd.Function):
    """x + linear(dropout(softmax(queries by keys)) by values), for queries, keys and values of norm(x).

    Positions are either rotary, by ``table``, cosines and sines [T, size] in fp32; or relative: ``positions``
    [2 T - 1, D] for all distances, with the queries' biases [D] ``near`` for keys and ``far`` for positions.

    skip : [B, T], True for frames that are not attended to
    mask : [T, T], True in a frame's row for frames that it does not attend to
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, skip: Tensor | None, gain: Tensor, shift: Tensor, w1: Tensor,
                near: Tensor | None, far: Tensor | None, positions: Tensor | None, w2: Tensor, b2: Tensor,
                table: tuple[Tensor, Tensor] | None, mask: Tensor | None, heads: int, scale: float, eps: float,
                p: float, dtype: torch.dtype) -> Tensor:
        b, t, columns = x.shape
        size = columns // heads
        x = x.contiguous()
        threads = torch.get_num_threads()
        normed, mean, rstd = _normalise(x, gain, shift, eps, dtype)
        w1 = w1.to(dtype)
        w2 = w2.to(dtype)
        query, key, value = normed.new_empty(3, b * heads, t, size)
        away = places = distances = None
        if positions is None:
            assert table is not None, "without positions there is a table"
            call("heads_forward", dtype, normed @ w1.t(), *table, scale, query, key, value, heads, t, b * t, size,
                 threads)
        else:
            away = normed.new_empty(heads, b * t, size)
            call("relative_forward", dtype, normed @ w1.t(), near, far, scale, query, away, key, value, heads, t, b * t,
                 size, threads)
            places = positions.to(dtype).view(-1, heads, size).permute(1, 2, 0).contiguous()
            distances = away @ places
        weights = query @ key.transpose(1, 2)
        dropped = torch.empty_like(weights)
        ctx.drop = _drop(weights.numel(), p)
        call("softmax_forward", dtype, weights, distances, _bytes(skip), _bytes(mask), ctx.drop, dropped, heads,
             b * heads * t, t, threads)
        attended = _matrix(x, b * t, columns, dtype)
        attended[:b * t].view(b, t, heads, size).copy_((dropped @ value).view(b, heads, t, size).transpose(1, 2))
        out = torch.empty_like(x)
        call("add_forward", dtype, x, attended @ w2.t(), b2, 1.0, None, _NO_DROPOUT, out, b * t, columns, threads)
        ctx.save_for_backward(x, gain, shift, mean, rstd, normed, w1, query, away, places, key, value, weights,
                              attended, w2)
        ctx.scale, ctx.heads, ctx.table = scale, heads, table
        return out

    @staticmethod
    @_once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, gain, shift, mean, rstd, normed, w1, query, away, places, key, value, weights, attended,
         w2) = ctx.saved_tensors
        dtype = normed.dtype
        b, t, columns = x.shape
        heads = ctx.heads
        size = columns // heads
        grad = grad.contiguous()
        of_added = _matrix(x, b * t, columns, dtype)
        of_b2 = _sums(x, columns)
        threads = len(of_b2)
        call("add_backward", dtype, grad, 1.0, None, _NO_DROPOUT, of_added, of_b2, b * t, columns, threads)
        of_attended = (of_added @ w2)[:b * t].view(b, t, heads, size).transpose(1, 2).reshape(-1, t, size)
        of_scores = of_attended @ value.transpose(1, 2)
        dropped = torch.empty_like(weights)
        of_distances = None if away is None else away.new_empty(heads, b * t, 2 * t - 1)
        call("softmax_backward", dtype, of_scores, weights, ctx.drop, dropped, of_distances, heads, b * heads * t, t,
             threads)
        of_query = of_scores @ key
        of_key = of_scores.transpose(1, 2) @ query
        of_value = dropped.transpose(1, 2) @ of_attended
        of_all = _matrix(x, b * t, 3 * columns, dtype)
        of_relative: tuple[Tensor | None, ...] = None, None, None
        if of_distances is None:
            call("heads_backward", dtype, of_query, of_key, of_value, *ctx.table, ctx.scale, of_all, heads, t, b * t,
                 size, threads)
        else:
            of_away = of_distances @ places.transpose(1, 2)
            of_biases = _sums(x, 2 * columns)
            call("relative_backward", dtype, of_query, of_away, of_key, of_value, ctx.scale, of_all, of_biases, heads,
                 t, b * t, size, threads)
            of_places = away.transpose(1, 2) @ of_distances
            of_relative = (of_biases[0, :columns], of_biases[0, columns:], of_places.permute(2, 0, 1).flatten(1))
        of_x, of_gain, of_shift = _unnormalise(of_all @ w1, x, gain, shift, mean, rstd, grad)
        return (of_x, None, of_gain, of_shift, _of_weight(of_all, normed, ctx.needs_input_grad[4]), *of_relative,
                _of_weight(of_added, attended, ctx.needs_input_grad[8]), of_b2[0], *[None] * 7)


class _Norm(torch.autograd.Function):
    """Layer norm over the dimensions of ``gain``, then an activation and dropout, with outputs in ``dtype``."""

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, gain: Tensor, shift: Tensor, eps: float, slope: float, p: float,
                dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        ctx.after = False, slope, _drop(x.numel(), p)
        out, mean, rstd = _normalise(x, gain, shift, eps, dtype, ctx.after, for_product=False)
        ctx.save_for_backward(x, gain, shift, mean, rstd)
        return out.view(x.shape)

    @staticmethod
    @_once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, shift, mean, rstd = ctx.saved_tensors
        return *_unnormalise(grad.contiguous(), x, gain, shift, mean, rstd, after=ctx.after), *[None] * 4


def norm(x: Tensor, layer: nn.LayerNorm, dtype: torch.dtype, slope: float = 1.0, p: float = 0.0) -> Tensor:
    """Compute the layer norm of x; then multiply negative values by ``slope`` and apply dropout ``p``."""
    return _Norm.apply(x, layer.weight, layer.bias, layer.eps, slope, p, dtype)


def activated_norm(x: Tensor, layer: nn.LayerNorm, activation: nn.LeakyReLU, drop: nn.Dropout) -> Tensor | None:
    """Compute the layer norm of x over its last two dimensions, then the activation and dropout, in one pass; None if
    the kernels don't support them."""
    dtype = precision(x)
    p = dropout.share(drop)
    if dtype is None or p is None or not known(activation, drop) or not fits(layer, x.shape[-2:]):
        return None
    return norm(x, layer, dtype, activation.negative_slope, p)
