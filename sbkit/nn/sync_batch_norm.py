"""Batch norm over the batches of all ranks, on any device, without host syncs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """``torch.nn.SyncBatchNorm`` for CPUs too. On a GPU torch's own syncs with the host in each layer, to leave out
    ranks with empty batches, which don't occur here."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """``[B, C, ...]`` to the same shape; all ranks must call it together."""
        if not self.training:
            return functional.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0,
                                         self.eps)
        output, mean, variance, count = _Normalised.apply(input, self.weight, self.bias, self.eps)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None and self.momentum is not None
                self.num_batches_tracked.add_(1)
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * (count / (count - 1).clamp(min=1)), self.momentum)
        return output


def convert(module: nn.Module) -> nn.Module:
    """Return a module whose batch norms use the batches of all ranks; parameters and their names don't change."""
    module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    for layer in module.modules():
        if type(layer) is nn.SyncBatchNorm:
            layer.__class__ = SyncBatchNorm  # type: ignore[assignment]  # the same attributes, another forward
    return module


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,  # autograd's, which has no type
                eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [0, *range(2, x.dim())]
        count = torch.full((1,), x.numel() // x.shape[1], dtype=torch.float32, device=x.device)
        sums = torch.cat([x.sum(dims, dtype=torch.float32), count])
        dist.all_reduce(sums)
        mean = sums[:-1] / sums[-1]
        count = sums[-1:]
        squares = (x.float() - _wide(mean, x)).square().sum(dims)
        dist.all_reduce(squares)
        variance = squares / count
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps = eps
        output = functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor,  # as above
                 *_: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, mean, variance, count = ctx.saved_tensors
        dims = [0, *range(2, x.dim())]
        of_output = gradient.float()
        scale = (variance + ctx.eps).rsqrt()
        normalised = (x.float() - _wide(mean, x)) * _wide(scale, x)
        sums_here = torch.stack([of_output.sum(dims), (of_output * normalised).sum(dims)])
        sums = sums_here.clone()
        dist.all_reduce(sums)
        factor = scale if weight is None else scale * weight
        of_input = (of_output - _wide(sums[0] / count, x) - normalised * _wide(sums[1] / count, x)) * _wide(factor, x)
        if weight is None:
            return of_input.to(x.dtype), None, None, None
        of_bias, of_weight = sums_here  # of this rank, as all gradients of parameters, which the exchange sums
        return of_input.to(x.dtype), of_weight, of_bias, None


def _wide(values: Tensor, x: Tensor) -> Tensor:
    """Return values of channels [C] in a shape that broadcasts with ``x`` [B, C, ...]."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
