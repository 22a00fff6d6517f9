"""Running statistics that a batch with NaN or infinity leaves as they are.

A step that is not finite is skipped without waiting for the device. What its forwards have written can't be undone
then, so each layer with statistics decides for itself, also on the device, before it writes.
"""

from __future__ import annotations

from typing import Any

import torch
from speechbrain.processing import features
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sbkit.nn.adapters import derived


def all_finite(*tensors: Tensor) -> Tensor:
    """Return whether no value is NaN or infinite: one bool on the device of the tensors, which the host doesn't read.

    A layer that learns a buffer in its forward keeps it so::

        torch.where(all_finite(new), new, self.table, out=self.table)
    """
    # The largest magnitude of a tensor with NaN is NaN. It takes one kernel, and isfinite four.
    largest = [torch.linalg.vector_norm(tensor.detach(), torch.inf) for tensor in tensors]
    return torch.stack(largest).isfinite().all()


def keep_finite(module: nn.Module) -> None:
    """Let torch's normalisations, ``SyncBatchNorm`` and SpeechBrain's ``InputNormalization`` accept only finite values.

    Classes are changed in place. For finite batches outputs and statistics are those of the layer itself, to the bit.
    """
    for layer in module.modules():
        if isinstance(layer, _NormBase) and not isinstance(layer, _FiniteNorm):
            layer.__class__ = derived(_FiniteNorm, type(layer))  # type: ignore[arg-type,assignment]  # a subclass
        elif type(layer) is features.InputNormalization:
            layer.__class__ = FiniteInputNormalization


class _FiniteNorm(nn.Module):
    """A layer whose forward writes to copies of its buffers, which are then accepted all together or not at all."""

    def forward(self, *args: Any, **kwargs: Any) -> object:  # those of the layer itself
        buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        if not (self.training and buffers):
            return super().forward(*args, **kwargs)
        for name, buffer in buffers.items():
            self._buffers[name] = buffer.clone()
        try:
            output = super().forward(*args, **kwargs)
            written = [value for name, value in self._buffers.items() if value is not None and name in buffers]
        finally:
            self._buffers.update(buffers)
        with torch.no_grad():
            finite = all_finite(*(value for value in written if value.is_floating_point()))
            for buffer, value in zip(buffers.values(), written, strict=True):
                torch.where(finite, value, buffer, out=buffer)  # in place: a CUDA graph knows the buffer by its address
        return output


class FiniteInputNormalization(features.InputNormalization):
    """SpeechBrain's own, for ``accelerate: false``. It waits for the device in each update, so this does too."""

    count: int
    glob_mean: Tensor
    glob_std: Tensor

    def _update_global_stats(self, x: Tensor, mask: Tensor) -> None:
        count = self.count
        mean = self.glob_mean.to(x.device)
        deviation = self.glob_std.to(x.device)
        super()._update_global_stats(x, mask)
        if not all_finite(self.glob_mean, self.glob_std):
            is_first = not mean.numel()
            self.count = 0 if is_first else count
            self.glob_mean = torch.zeros_like(self.glob_mean) if is_first else mean
            self.glob_std = torch.ones_like(self.glob_std) if is_first else deviation
