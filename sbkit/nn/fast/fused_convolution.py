"""A Conformer's convolution module as one autograd function; see ``fused`` for the steps that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sbkit.nn.fast.autocast import Context, without_autocast
from sbkit.nn.fast.fused import (
    SILU,
    Layer,
    add_branch,
    add_branch_backward,
    as_bytes,
    is_wanted,
    make_dropout,
    normalise,
    normalise_backward,
    once_differentiable,
    product_matrix,
    thread_sums,
    weight_gradient,
)
from sbkit.nn.native import library


@dataclass(frozen=True)
class _ConvolutionSettings:
    """What ``convolution`` is given besides tensors with gradients."""

    eps1: float
    eps2: float
    dropout: float
    chunk: int
    skip: Tensor | None
    dtype: torch.dtype


class _Convolution(NamedTuple):
    """The inputs of ``ConvolutionPart``; its backward returns their gradients in another one."""

    x: Tensor | None
    gain1: Tensor | None
    shift1: Tensor | None
    w1: Tensor | None
    b1: Tensor | None
    kernel: Tensor | None
    bias: Tensor | None
    gain2: Tensor | None
    shift2: Tensor | None
    w2: Tensor | None
    b2: Tensor | None
    settings: _ConvolutionSettings | None = None


class _ConvolutionSaved(NamedTuple):
    """What backward needs of forward, by the names there."""

    x: Tensor
    skip: Tensor | None
    gain1: Tensor
    shift1: Tensor
    mean1: Tensor
    rstd1: Tensor
    normed: Tensor
    w1: Tensor
    wide: Tensor
    b1: Tensor
    gated: Tensor
    kernel: Tensor
    convolved: Tensor
    gain2: Tensor
    shift2: Tensor
    mean2: Tensor
    rstd2: Tensor
    active: Tensor
    w2: Tensor


def convolution(x: Tensor, *, skip: Tensor | None, first_norm: Layer, first: Layer, depthwise: Layer,
                second_norm: Layer, second: Layer, dropout: float, chunk: int, dtype: torch.dtype) -> Tensor:
    """Return x plus a Conformer's convolution module of it: [B, T, D] to [B, T, D].

    skip : [B, T, 1], True for padding
    first : the convolution of one tap to 2 D, before the gated linear unit
    second : the linear layer after the second norm and SiLU
    chunk : frames of a chunk, which see nothing beyond its end; T or more: the whole utterance
    """
    settings = _ConvolutionSettings(eps1=first_norm.eps, eps2=second_norm.eps, dropout=dropout, chunk=chunk, skip=skip,
                                    dtype=dtype)
    return ConvolutionPart.apply(*_Convolution(
        x=x,
        gain1=first_norm.weight,
        shift1=first_norm.bias,
        w1=first.weight,
        b1=first.bias,
        kernel=depthwise.weight,
        bias=depthwise.bias,
        gain2=second_norm.weight,
        shift2=second_norm.bias,
        w2=second.weight,
        b2=second.bias,
        settings=settings))


class ConvolutionPart(torch.autograd.Function):
    """x + dropout(linear(silu(norm(depthwise(glu(linear(norm(x)))))))); only x where ``skip`` [B, T, 1] is True.

    For N = B T rows, the taps k = 0, 1, ... of the depthwise kernel, of which c = taps // 2 is the middle one, and
    frames t of one utterance, with the rules and names of ``fused``:

        normed       = norm1(x)                                              [N, D]
        wide         = normed @ w1.T                                         [N, 2 D]
        a, b         = the left and the right half of wide + b1              [N, D] each
        gated        = a * sigmoid(b), and 0 where skip                      [N, D]
        convolved[t] = bias + sum over k of kernel[k] * gated[t + k - c]     [N, D]
        active       = silu(norm2(convolved))                                [N, D]
        branch       = active @ w2.T                                         [N, D]
        y            = x + m * (branch + b2), and x where skip               [N, D]

    In the sum a frame t sees frame s = t + k - c if s is inside the utterance and not beyond the end of t's chunk of
    ``chunk`` frames; other frames count as 0. Backward, from the last line to the first, where sums over k and t are
    over the pairs of frames of which t sees s:

        d_branch    = m * d_y, and 0 where skip
        d_convolved = norm2's gradient for silu'(norm2(convolved)) * (d_branch @ w2)
        d_gated[s]  = sum over k of kernel[k] * d_convolved[s - k + c]
        d_kernel[k] = sum over t of d_convolved[t] * gated[t + k - c]
        d_bias      = sum over t of d_convolved[t]
        d_a         = d_gated * sigmoid(b)                             d_wide is both, side by side, and 0 where skip
        d_b         = d_gated * a * sigmoid(b) * (1 - sigmoid(b))
        d_x         = d_y + norm1's gradient for d_normed = d_wide @ w1

    The gradients of w1, b1, w2 and b2 follow from d_wide and d_branch by the rule of a linear step.
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Context, x: Tensor, gain1: Tensor, shift1: Tensor, w1: Tensor, b1: Tensor, kernel: Tensor,
                bias: Tensor, gain2: Tensor, shift2: Tensor, w2: Tensor, b2: Tensor,
                settings: _ConvolutionSettings) -> Tensor:
        dtype = settings.dtype
        batch, frames, columns = x.shape
        sizes = {"rows": batch * frames, "columns": columns, "threads": torch.get_num_threads()}
        x = x.contiguous()
        skip = as_bytes(settings.skip)
        w1 = w1.squeeze(-1).to(dtype)
        w2 = w2.to(dtype)
        kernel = kernel.squeeze(1).t().contiguous()  # [taps, D]

        normed = normalise(x, gain1, shift1, settings.eps1, dtype)
        wide = normed.values @ w1.t()
        gated, convolved = normed.values.new_empty(2, batch * frames, columns)
        library.call(
            "glu_forward", dtype,
            x=wide,
            bias=b1,
            skip=skip,
            out=gated,
            **sizes,
        )
        library.call(
            "depthwise_forward", dtype,
            x=gated,
            kernel=kernel,
            bias=bias,
            out=convolved,
            taps=len(kernel),
            chunk=settings.chunk,
            frames=frames,
            **sizes,
        )
        active = normalise(convolved, gain2, shift2, settings.eps2, dtype, after=SILU)

        ctx.settings = settings
        ctx.drop = make_dropout(x.numel(), settings.dropout)
        out = add_branch(x, branch=active.values @ w2.t(), bias=b2, skip=skip, drop=ctx.drop)
        ctx.save_for_backward(*_ConvolutionSaved(
            x=x, skip=skip, gain1=gain1, shift1=shift1, mean1=normed.mean, rstd1=normed.rstd, normed=normed.values,
            w1=w1, wide=wide, b1=b1, gated=gated, kernel=kernel, convolved=convolved, gain2=gain2, shift2=shift2,
            mean2=active.mean, rstd2=active.rstd, active=active.values, w2=w2))
        return out

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Context, grad: Tensor) -> _Convolution:
        saved = _ConvolutionSaved(*ctx.saved_tensors)
        dtype = ctx.settings.dtype
        batch, frames, columns = saved.x.shape
        sizes = {"rows": batch * frames, "columns": columns, "threads": torch.get_num_threads()}
        grad = grad.contiguous()
        grad_branch, grad_b2 = add_branch_backward(grad, dtype, skip=saved.skip, drop=ctx.drop)
        of_norm2 = normalise_backward(
            grad_branch @ saved.w2,
            x=saved.convolved,
            gain=saved.gain2,
            shift=saved.shift2,
            mean=saved.mean2,
            rstd=saved.rstd2,
            after=SILU,
        )

        taps = len(saved.kernel)
        grad_gated = torch.empty_like(saved.gated)
        depthwise_sums = thread_sums(grad, (taps + 1) * columns)
        library.call(
            "depthwise_backward", dtype,
            grad=of_norm2.x,
            x=saved.gated,
            kernel=saved.kernel,
            to=grad_gated,
            sums=depthwise_sums,
            taps=taps,
            chunk=ctx.settings.chunk,
            frames=frames,
            **sizes,
        )
        grad_taps_and_bias = depthwise_sums[0].view(taps + 1, columns)

        grad_wide = product_matrix(grad, batch * frames, 2 * columns, dtype)
        glu_sums = thread_sums(grad, 2 * columns)
        library.call(
            "glu_backward", dtype,
            grad=grad_gated,
            x=saved.wide,
            bias=saved.b1,
            skip=saved.skip,
            to=grad_wide,
            sums=glu_sums,
            **sizes,
        )

        of_norm1 = normalise_backward(
            grad_wide @ saved.w1,
            x=saved.x,
            gain=saved.gain1,
            shift=saved.shift1,
            mean=saved.mean1,
            rstd=saved.rstd1,
            add=grad,
        )
        grad_w1 = weight_gradient(grad_wide, saved.normed, is_wanted(ctx, _Convolution._fields, "w1"))
        return _Convolution(
            x=of_norm1.x,
            gain1=of_norm1.gain,
            shift1=of_norm1.shift,
            w1=None if grad_w1 is None else grad_w1[..., None],  # it is a convolution's, of one tap
            b1=glu_sums[0],
            kernel=grad_taps_and_bias[:-1].t()[:, None],
            bias=grad_taps_and_bias[-1],
            gain2=of_norm2.gain,
            shift2=of_norm2.shift,
            w2=weight_gradient(grad_branch, saved.active, is_wanted(ctx, _Convolution._fields, "w2")),
            b2=grad_b2)
