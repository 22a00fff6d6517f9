"""Parts of Conformer layers for training on a CPU: torch's matrix products, and ``sbkit.nn.native`` between them.

Each part is one autograd function with its own backward: ``fused_feed_forward``, ``fused_attention`` and
``fused_convolution``. Here are the steps that they share, and a norm by itself. Results and dropout masks equal those
of the separate modules, except that intermediate values are rounded less often under autocast.

The parts are made of four kinds of steps. Below, ``@`` is a product of matrices and ``*`` one of elements; ``d_x`` is
the gradient of the loss for ``x``; and sums and means of rows are over the D columns, unless they are "over rows".

=========  ================================================  ========================================================
step       forward                                           backward
=========  ================================================  ========================================================
linear     z = a @ W.T + b                                   d_a = d_z @ W,  d_W = d_z.T @ a,  d_b = sum over rows d_z
norm       h = (x - mean(x)) * rstd,  n = gain * h + shift,  d_h = gain * d_n,  d_gain = sum over rows d_n * h,
           rstd = 1 / sqrt(variance(x) + eps)                d_shift = sum over rows d_n,
                                                             d_x = rstd * (d_h - mean(d_h) - h * mean(d_h * h))
dropout    y = m * a;  m is 0, or 1 / (1 - p) if kept        d_a = m * d_y
residual   y = x + weight * m * z                            d_z = weight * m * d_y,  and d_y is a part of d_x
=========  ================================================  ========================================================

A mask m is not kept for backward: kernels compute it twice from the same random words (see ``sbkit.nn.fast.dropout``).
A bias and what follows it are computed by the kernel that reads the product, so a tensor named ``hidden``, ``wide`` or
``branch`` lacks the bias.
"""

from __future__ import annotations

import math
from ctypes import byref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sbkit.nn.fast import dropout
from sbkit.nn.fast.autocast import Context, without_autocast
from sbkit.nn.fast.norm import LayerNorm
from sbkit.nn.native import library
from sbkit.nn.native.library import WIDEST, DropoutStruct

once_differentiable: Any = torch.autograd.function.once_differentiable  # torch's type for it does not fit ``backward``
_KNOWN = (torch.float32, torch.bfloat16)
_NORMS = (nn.LayerNorm, LayerNorm)
Layer = Any  # a module whose attributes follow from checks of its class, which mypy can't see


# ------------------------------------------------------------ whether the kernels can be used


def precision(x: Tensor) -> torch.dtype | None:
    """Return the type of activations if the fused parts can be used for ``x``, otherwise None."""
    if torch.compiler.is_compiling() or not library.loaded() or type(x) not in (Tensor, nn.Parameter):
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


def as_bytes(skip: Tensor | None) -> Tensor | None:
    """Return a boolean mask as the kernels take it."""
    return None if skip is None else skip.contiguous().view(torch.uint8)


# ------------------------------------------------------------ the steps that all parts have


#: Rows of matrices in products come in multiples of this at least.
_LEAST_UNIT = 64
DropoutArgument = Any  # a reference to a DropoutStruct, whose type in ctypes has no name
NO_DROPOUT: DropoutArgument = byref(DropoutStruct(None, None, 1, 0, 1.0))


@dataclass(frozen=True)
class AfterNorm:
    """What a kernel does to a norm's output: an activation, and then dropout."""

    smooth: bool = False
    """Whether the activation is SiLU."""
    slope: float = 1.0
    """Otherwise negative values are multiplied by this."""
    dropout: DropoutArgument = NO_DROPOUT


IDENTITY = AfterNorm()
SILU = AfterNorm(smooth=True)


class Normed(NamedTuple):
    """The output [N, D] of a norm, and what its backward needs: each row's mean and reciprocal deviation, [N]."""

    values: Tensor
    mean: Tensor
    rstd: Tensor


class NormGradients(NamedTuple):
    """The gradients of a norm's input and parameters, in their shapes."""

    x: Tensor
    gain: Tensor
    shift: Tensor


def make_dropout(count: int, p: float) -> DropoutArgument:
    """Make the dropout of one activation, whose mask kernels compute from random words, in backward once more."""
    if not p:
        return NO_DROPOUT
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


def product_matrix(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Allocate a matrix for a product; a kernel writes its first ``rows``, and the others are 0."""
    filled_up = _filled_up(rows, dtype)
    matrix = like.new_empty(filled_up, columns, dtype=dtype)
    if filled_up > rows:
        matrix[rows:].zero_()
    return matrix


def thread_sums(like: Tensor, columns: int) -> Tensor:
    """Allocate zeros for the threads of a kernel to sum into; the first row will hold the result."""
    return like.new_zeros(torch.get_num_threads(), columns, dtype=torch.float32)


def rows_of(x: Tensor) -> int:
    """Return N of [..., D]: how many rows of features there are."""
    return x.numel() // x.shape[-1]


def normalise(x: Tensor, gain: Tensor, shift: Tensor, eps: float, dtype: torch.dtype, after: AfterNorm = IDENTITY,
               for_product: bool = True) -> Normed:
    """Normalise rows, [..., D] to [N, D] in ``dtype``, and do what comes ``after``.

    for_product : whether the result is a ``product_matrix``, with rows of 0 after these
    """
    columns = gain.numel()
    rows = x.numel() // columns
    values = product_matrix(x, rows, columns, dtype) if for_product else x.new_empty(rows, columns, dtype=dtype)
    mean, rstd = x.new_empty(2, rows, dtype=torch.float32)
    library.call(
        "norm_forward", dtype,
        x=x,
        narrow=x.dtype != torch.float32,
        gain=gain,
        shift=shift,
        eps=eps,
        smooth=after.smooth,
        slope=after.slope,
        dropout=after.dropout,
        out=values,
        mean=mean,
        rstd=rstd,
        rows=rows,
        columns=columns,
        threads=torch.get_num_threads(),
    )
    return Normed(values, mean, rstd)


def normalise_backward(grad: Tensor, x: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor,
                       add: Tensor | None = None, after: AfterNorm = IDENTITY) -> NormGradients:
    """Return the gradients of x (plus ``add``), gain and shift from that of ``normalise``'s output."""
    columns = gain.numel()
    grad_x = torch.empty_like(x)
    sums = thread_sums(x, 2 * columns)
    library.call(
        "norm_backward", grad.dtype,
        grad=grad,
        x=x,
        narrow=x.dtype != torch.float32,
        gain=gain,
        shift=shift,
        smooth=after.smooth,
        slope=after.slope,
        dropout=after.dropout,
        mean=mean,
        rstd=rstd,
        add=add,
        to=grad_x,
        sums=sums,
        rows=x.numel() // columns,
        columns=columns,
        threads=len(sums),
    )
    grad_gain, grad_shift = sums[0].view(2, *gain.shape)
    return NormGradients(grad_x, grad_gain, grad_shift)


def add_branch(x: Tensor, branch: Tensor, bias: Tensor, weight: float = 1.0, skip: Tensor | None = None,
               drop: DropoutArgument = NO_DROPOUT) -> Tensor:
    """Return x + weight * dropout(branch + bias), [B, T, D]; only x in rows where ``skip`` is 1."""
    out = torch.empty_like(x)
    library.call(
        "add_forward", branch.dtype,
        x=x,
        branch=branch,
        bias=bias,
        weight=weight,
        skip=skip,
        dropout=drop,
        out=out,
        rows=rows_of(x),
        columns=x.shape[-1],
        threads=torch.get_num_threads(),
    )
    return out


def add_branch_backward(grad: Tensor, dtype: torch.dtype, weight: float = 1.0, skip: Tensor | None = None,
                        drop: DropoutArgument = NO_DROPOUT) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``add_branch``'s branch, a ``product_matrix`` in ``dtype``, and of its bias."""
    rows = rows_of(grad)
    columns = grad.shape[-1]
    grad_branch = product_matrix(grad, rows, columns, dtype)
    sums = thread_sums(grad, columns)
    library.call(
        "add_backward", dtype,
        grad=grad,
        weight=weight,
        skip=skip,
        dropout=drop,
        to=grad_branch,
        sums=sums,
        rows=rows,
        columns=columns,
        threads=len(sums),
    )
    return grad_branch, sums[0]


def is_wanted(ctx: Context, inputs: tuple[str, ...], name: str) -> bool:
    """Return whether the gradient of the input ``name`` is wanted, of a function that is applied to these inputs."""
    return bool(ctx.needs_input_grad[inputs.index(name)])


def weight_gradient(grad: Tensor, x: Tensor, wanted: bool) -> Tensor | None:
    """Return the gradient of the weight of x @ weight.T in fp32, from that of the product; None if it isn't wanted."""
    return (grad.t() @ x).float() if wanted else None


# ------------------------------------------------------------ a norm by itself


class _Norm(torch.autograd.Function):
    """Layer norm over the dimensions of ``gain``, then an activation and dropout, with outputs in ``dtype``."""

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, gain: Tensor, shift: Tensor, eps: float, slope: float, p: float,
                dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        ctx.after = AfterNorm(slope=slope, dropout=make_dropout(x.numel(), p))
        normed = normalise(x, gain, shift, eps, dtype, ctx.after, for_product=False)
        ctx.save_for_backward(x, gain, shift, normed.mean, normed.rstd)
        return normed.values.view(x.shape)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, shift, mean, rstd = ctx.saved_tensors
        gradients = normalise_backward(grad.contiguous(), x, gain, shift, mean, rstd, after=ctx.after)
        return *gradients, None, None, None, None


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
