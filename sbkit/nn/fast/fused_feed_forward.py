"""A Conformer's feed-forward module as one autograd function; see ``fused`` for the steps that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sbkit.nn.fast.autocast import Context, without_autocast
from sbkit.nn.fast.fused import (
    Layer,
    add_branch,
    add_branch_backward,
    is_wanted,
    make_dropout,
    normalise,
    normalise_backward,
    once_differentiable,
    product_matrix,
    rows_of,
    thread_sums,
    weight_gradient,
)
from sbkit.nn.native import library


@dataclass(frozen=True)
class _FeedForwardSettings:
    """What ``feed_forward`` is given besides tensors."""

    eps: float
    inner_dropout: float
    outer_dropout: float
    weight: float
    dtype: torch.dtype


class _FeedForward(NamedTuple):
    """The inputs of ``FeedForwardPart``; its backward returns their gradients in another one."""

    x: Tensor | None
    gain: Tensor | None
    shift: Tensor | None
    w1: Tensor | None
    b1: Tensor | None
    w2: Tensor | None
    b2: Tensor | None
    settings: _FeedForwardSettings | None = None


class _FeedForwardSaved(NamedTuple):
    """What backward needs of forward, by the names there."""

    x: Tensor
    gain: Tensor
    shift: Tensor
    mean: Tensor
    rstd: Tensor
    normed: Tensor
    hidden: Tensor
    b1: Tensor
    active: Tensor
    w1: Tensor
    w2: Tensor


def feed_forward(x: Tensor, *, norm: Layer, first: Layer, second: Layer, inner_dropout: float, outer_dropout: float,
                 weight: float, dtype: torch.dtype) -> Tensor:
    """Return x plus ``weight`` times a Conformer's feed-forward module of it: [B, T, D] to [B, T, D].

    norm, first, second : the layer norm, and the linear layers from D and to D
    inner_dropout : the share that is dropped between them
    outer_dropout : the share that is dropped behind them
    """
    settings = _FeedForwardSettings(eps=norm.eps, inner_dropout=inner_dropout, outer_dropout=outer_dropout,
                                    weight=weight, dtype=dtype)
    return FeedForwardPart.apply(*_FeedForward(
        x=x,
        gain=norm.weight,
        shift=norm.bias,
        w1=first.weight,
        b1=first.bias,
        w2=second.weight,
        b2=second.bias,
        settings=settings))


class FeedForwardPart(torch.autograd.Function):
    """x + weight * dropout(linear(dropout(silu(linear(norm(x)))))).

    For N = B T rows and F hidden features, with the rules and names of ``fused``:

        normed = norm(x)                                  [N, D]
        hidden = normed @ w1.T                            [N, F]
        active = m_inner * silu(hidden + b1)              [N, F]
        branch = active @ w2.T                            [N, D]
        y      = x + weight * m_outer * (branch + b2)     [N, D]

    Backward, from the last line to the first:

        d_branch = weight * m_outer * d_y
        d_b2     = sum over rows d_branch
        d_w2     = d_branch.T @ active
        d_hidden = m_inner * silu'(hidden + b1) * (d_branch @ w2)
        d_b1     = sum over rows d_hidden
        d_w1     = d_hidden.T @ normed
        d_x      = d_y + the norm's gradient for d_normed = d_hidden @ w1
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor,
                settings: _FeedForwardSettings) -> Tensor:
        dtype = settings.dtype
        x = x.contiguous()
        rows = rows_of(x)
        normed = normalise(x, gain, shift, settings.eps, dtype)
        w1 = w1.to(dtype)
        w2 = w2.to(dtype)

        hidden = normed.values @ w1.t()
        width = hidden.shape[1]
        active = product_matrix(x, rows, width, dtype)
        ctx.settings = settings
        ctx.inner_drop = make_dropout(rows * width, settings.inner_dropout)
        library.call(
            "silu_forward", dtype,
            x=hidden,
            bias=b1,
            dropout=ctx.inner_drop,
            out=active,
            rows=rows,
            columns=width,
            threads=torch.get_num_threads(),
        )

        ctx.outer_drop = make_dropout(x.numel(), settings.outer_dropout)
        out = add_branch(x, branch=active @ w2.t(), bias=b2, weight=settings.weight, drop=ctx.outer_drop)
        ctx.save_for_backward(*_FeedForwardSaved(
            x=x, gain=gain, shift=shift, mean=normed.mean, rstd=normed.rstd, normed=normed.values, hidden=hidden, b1=b1,
            active=active, w1=w1, w2=w2))
        return out

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> _FeedForward:
        saved = _FeedForwardSaved(*ctx.saved_tensors)
        dtype = ctx.settings.dtype
        grad = grad.contiguous()
        grad_branch, grad_b2 = add_branch_backward(grad, dtype, weight=ctx.settings.weight, drop=ctx.outer_drop)

        grad_hidden = grad_branch @ saved.w2  # until the kernel replaces it by the gradient in front of SiLU
        width = saved.hidden.shape[1]
        sums = thread_sums(grad, width)
        library.call(
            "silu_backward", dtype,
            grad=grad_hidden,
            x=saved.hidden,
            bias=saved.b1,
            dropout=ctx.inner_drop,
            sums=sums,
            rows=rows_of(grad),
            columns=width,
            threads=len(sums),
        )

        of_norm = normalise_backward(
            grad_hidden @ saved.w1,
            x=saved.x,
            gain=saved.gain,
            shift=saved.shift,
            mean=saved.mean,
            rstd=saved.rstd,
            add=grad,
        )
        return _FeedForward(
            x=of_norm.x,
            gain=of_norm.gain,
            shift=of_norm.shift,
            w1=weight_gradient(grad_hidden, saved.normed, is_wanted(ctx, _FeedForward._fields, "w1")),
            b1=sums[0],
            w2=weight_gradient(grad_branch, saved.active, is_wanted(ctx, _FeedForward._fields, "w2")),
            b2=grad_b2)
