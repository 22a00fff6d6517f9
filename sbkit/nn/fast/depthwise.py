"""A Conformer's depthwise convolution as two GPU kernels on [B, T, D], where it lies: nothing is transposed or cast.

torch's own kernel takes [B, D, T], is slow in half precision, and needs the weights in the type of the activations.
Here they stay in fp32, and so do sums. Weights are summed by blocks of frames, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sbkit.nn.fast.autocast import Context

#: Frames and columns of a program, and so of a block.
TIME, WIDE = 32, 64
_once_differentiable: Any = once_differentiable  # torch's type for it does not fit ``backward``

# Tap k of output frame t reads input frame s, where
#
#     s = t + k - AROUND,   so   t = s + AROUND - k,   for k = 0, 1, ..., TAPS - 1
#
# if t sees s: if s is in the utterance, and not beyond the end of t's chunk. AROUND is how many frames before itself a
# frame sees: TAPS // 2 for a centred convolution, TAPS - 1 for a causal one. With 5 taps, centred, in chunks of 4:
#
#     frames      0 1 2 3 | 4 5 6 7
#     t = 3 reads   1 2 3               taps 0, 1, 2; taps 3 and 4 are beyond its chunk
#     t = 4 reads     2 3   4 5 6       all taps: frames of earlier chunks are seen
#
# Forward, a frame collects what it reads; backward, an input frame collects from the frames that read it:
#
#     out[t]       = bias + sum over k of kernel[k] * x[t + k - AROUND]
#     of_x[s]      = sum over k of kernel[k] * of_out[s + AROUND - k]
#     of_kernel[k] = sum over t of of_out[t] * x[t + k - AROUND]
#     of_bias      = sum over t of of_out[t]
#
# So the first two are one kernel, which with BACK has the other sign of the offset, and asks whether the other frame
# sees this one.
#
# A program computes TIME frames by WIDE columns of one utterance: the grid is [blocks of frames, blocks of columns, B].


@triton.jit
def _seen(t, other, frames, chunk):  # type: ignore[no-untyped-def]  # noqa: ANN001  (Triton's, which has other types)
    """Whether frame t sees the other: not beyond the utterance, nor beyond its own chunk."""
    return (t >= 0) & (t < frames) & (other >= 0) & (other < frames) & (other < (t // chunk + 1) * chunk)


@triton.jit(do_not_specialize=["frames", "chunk"])
def convolve_frames(  # type: ignore[no-untyped-def]
    x, kernel, bias, out, frames, columns, chunk,  # noqa: ANN001  (as above)
    TAPS: tl.constexpr, AROUND: tl.constexpr, BACK: tl.constexpr, TIME: tl.constexpr, WIDE: tl.constexpr,
) -> None:
    """Convolve a block of frames and columns; or, if BACK, compute the gradient of x from that of the outputs.

    x : [B, T, D]; if BACK, the gradient of the outputs
    out : [B, T, D]; if BACK, the gradient of the inputs
    """
    t = tl.program_id(0) * TIME + tl.arange(0, TIME)
    d = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    is_column = d < columns
    utterance = tl.program_id(2).to(tl.int64)
    begin = utterance * frames * columns
    total = tl.zeros((TIME, WIDE), tl.float32)
    for k in range(TAPS):
        if BACK:
            other = t + AROUND - k
            seen = _seen(other, t, frames, chunk)
        else:
            other = t + k - AROUND
            seen = _seen(t, other, frames, chunk)
        value = tl.load(x + begin + other[:, None] * columns + d[None, :], mask=seen[:, None] & is_column[None, :],
                        other=0.0)
        tap = tl.load(kernel + d * TAPS + k, mask=is_column, other=0.0)
        total += value.to(tl.float32) * tap.to(tl.float32)[None, :]
    if not BACK:
        total += tl.load(bias + d, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out + begin + t[:, None] * columns + d[None, :], total.to(out.dtype.element_ty),
             mask=(t < frames)[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["frames", "chunk"])
def sum_taps(  # type: ignore[no-untyped-def]
    x, grad, sums, frames, columns, chunk,  # noqa: ANN001  (as above)
    TAPS: tl.constexpr, AROUND: tl.constexpr, TIME: tl.constexpr, WIDE: tl.constexpr,
) -> None:
    """Sum the gradients of the taps, and behind them of the bias, over a block of frames.

    sums : [B * blocks of frames, TAPS + 1, D]; a program writes WIDE columns of one row, so the order of sums is fixed
    """
    t = tl.program_id(0) * TIME + tl.arange(0, TIME)
    d = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    is_column = d < columns
    utterance = tl.program_id(2).to(tl.int64)
    begin = utterance * frames * columns
    of_out = tl.load(grad + begin + t[:, None] * columns + d[None, :], mask=(t < frames)[:, None] & is_column[None, :],
                     other=0.0).to(tl.float32)
    row = utterance * tl.num_programs(0) + tl.program_id(0)
    sums += row * (TAPS + 1) * columns + d
    for k in range(TAPS):
        other = t + k - AROUND
        mask = _seen(t, other, frames, chunk)[:, None] & is_column[None, :]
        value = tl.load(x + begin + other[:, None] * columns + d[None, :], mask=mask, other=0.0)
        tl.store(sums + k * columns, tl.sum(of_out * value.to(tl.float32), 0), mask=is_column)
    tl.store(sums + TAPS * columns, tl.sum(of_out, 0), mask=is_column)


class Depthwise(torch.autograd.Function):
    """A depthwise convolution that keeps the number of frames: [B, T, D] -> [B, T, D].

    kernel, bias : [D, 1, taps] and [D], as of ``Conv1d``
    around : how many frames before itself a frame sees; of those after it, it sees taps - 1 - around
    chunk : frames of a chunk, which see nothing beyond its end; T or more: the whole utterance
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, kernel: Tensor, bias: Tensor, around: int, chunk: int) -> Tensor:
        b, t, columns = x.shape
        x = x.contiguous()
        kernel = kernel.contiguous()
        ctx.grid = (triton.cdiv(t, TIME), triton.cdiv(columns, WIDE), b)
        ctx.sizes = {"frames": t, "columns": columns, "chunk": chunk, "TAPS": kernel.shape[2], "AROUND": around,
                     "TIME": TIME, "WIDE": WIDE}
        out = torch.empty_like(x)
        convolve_frames[ctx.grid](x, kernel, bias, out, BACK=False, **ctx.sizes)
        ctx.save_for_backward(x, kernel, bias)
        return out

    @staticmethod
    @_once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel, bias = ctx.saved_tensors
        grad = grad.contiguous()
        blocks_of_frames, _, b = ctx.grid
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x)
            convolve_frames[ctx.grid](grad, kernel, bias, of_x, BACK=True, **ctx.sizes)
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return of_x, None, None, None, None
        sums = x.new_empty(b * blocks_of_frames, kernel.shape[2] + 1, x.shape[2], dtype=torch.float32)
        sum_taps[ctx.grid](x, grad, sums, **ctx.sizes)
        total = sums.sum(0)  # [taps + 1, D]
        of_kernel = total[:-1].t()[:, None].to(kernel.dtype)
        of_bias = total[-1].to(bias.dtype)
        return of_x, of_kernel, of_bias, None, None


def by_torch(x: Tensor, kernel: Tensor, bias: Tensor, around: int, chunk: int) -> Tensor:
    """Compute the same plainly."""
    behind = kernel.shape[2] - 1 - around
    pieces = []
    for begin in range(0, x.shape[1], chunk):
        piece = x[:, max(0, begin - around) : begin + chunk].transpose(1, 2)
        piece = functional.pad(piece, (max(0, around - begin), behind))
        pieces.append(functional.conv1d(piece, kernel, bias, groups=len(kernel)).transpose(1, 2))
    return torch.cat(pieces, 1)


def example(by: Callable[..., Tensor], device: torch.device | str, dtype: torch.dtype, around: int = 3, taps: int = 7,
            chunk: int = 40, frames: int = 75, columns: int = 70) -> list[Tensor]:
    """Compute outputs and gradients by ``by``: of the same numbers, with few bits, for each device and type."""
    def numbers(offset: int, shape: tuple[int, ...], number_type: torch.dtype) -> Tensor:
        waves = torch.arange(offset, offset + torch.Size(shape).numel()).double().sin_()
        return waves.mul_(64).round_().div_(64).view(shape).to(device, number_type)

    wide = torch.promote_types(dtype, torch.float32)
    x = numbers(0, (2, frames, columns), dtype).requires_grad_()
    kernel = numbers(7, (columns, 1, taps), wide).requires_grad_()
    bias = numbers(14, (columns,), wide).requires_grad_()
    of_out = numbers(21, (2, frames, columns), dtype)
    out = by(x, kernel, bias, around, chunk)
    return [out, *torch.autograd.grad(out, (x, kernel, bias), of_out)]
