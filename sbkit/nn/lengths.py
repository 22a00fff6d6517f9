"""How many frames a strided stack of layers makes of T frames: exact integers, for any stack."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch

#: One number of frames, or a tensor of them.
N = TypeVar("N", int, torch.Tensor)
_PROBED = 64  # longest input that is tried: enough for a subsampling of 16


class LengthRule:
    """The number of output frames as a function of the number of input frames.

    A relative length times the padded length, rounded, depends on what else is in the batch. This
    doesn't: it is found once, by running the layers for T = 1, 2, 3, ... and reading the period (the
    subsampling factor) off the result.

    Arguments
    ---------
    outputs : list of int
        ``outputs[t]`` is the number of output frames for t input frames.
    """

    def __init__(self, outputs: list[int]):
        self.factor = self._period(outputs)
        for t in reversed(range(1, len(outputs) - self.factor)):  # too short for a reflected padding: read backwards
            outputs[t] = outputs[t] or max(outputs[t + self.factor] - 1, 0)
        self.outputs = outputs  # for plain integers, which must not depend on tensors: shapes are checked without any
        self.table = torch.tensor(outputs)

    @staticmethod
    def _period(outputs: list[int]) -> int:
        n = len(outputs)
        for factor in range(1, n // 3):
            if all(outputs[t] + 1 == outputs[t + factor] for t in range(n // 3, n - factor)):
                return factor
        raise ValueError("the layers do not shorten their input by a whole factor")

    @classmethod
    def identity(cls) -> LengthRule:
        return cls(list(range(_PROBED)))

    @classmethod
    def probe(cls, module: torch.nn.Module, features: int) -> LengthRule:
        """Find the rule of ``module``, which maps [B, T, features] to [B, T', ...]."""
        # so few frames are computed ten times as fast as their shapes are worked out on the meta device
        device = "meta" if any(each.is_meta for each in (*module.parameters(), *module.buffers())) else "cpu"
        twin = copy.deepcopy(module).to(device).eval()
        outputs = [0]
        with torch.no_grad():
            for frames in range(1, _PROBED):
                try:
                    outputs.append(twin(torch.zeros(1, frames, features, device=device)).shape[1])
                except (RuntimeError, ValueError):  # shorter than a kernel or its reflected padding
                    outputs.append(0)
        return cls(outputs)

    def __call__(self, frames: N) -> N:
        """Output frames for each input length (an int, or an integer tensor of any shape and device)."""
        n, f = len(self.table), self.factor
        if isinstance(frames, int):
            if frames < n:
                return self.outputs[frames]
            return self.outputs[n - f + (frames - n) % f] + (frames - n) // f + 1
        if self.table.device != frames.device:
            self.table = self.table.to(frames.device)
        beyond = (frames - n).clamp(min=0)
        index = torch.where(frames < n, frames, n - f + beyond % f)
        return self.table[index] + torch.where(frames < n, 0, torch.div(beyond, f, rounding_mode="floor") + 1)


def lengths_to_mask(lengths: torch.Tensor, size: int) -> torch.Tensor:
    """True for the frames that exist: [B] -> [B, size]."""
    return torch.arange(size, device=lengths.device)[None, :] < lengths[:, None]
