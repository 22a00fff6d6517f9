"""Exact numbers of output frames of any stack of strided layers, and helpers for lengths and masks."""

from __future__ import annotations

import contextlib
import copy
import inspect
from typing import TypeVar

import torch

#: A length, or a tensor of lengths.
N = TypeVar("N", int, torch.Tensor)
_FIRST, _PROBED = 23, 64  # inputs to try, and further ones if these show no rule; enough for subsampling by 16


class LengthRule:
    """The number of output frames as a function of the number of input frames.

    Unlike a relative length times the padded length, rounded, the result does not depend on the batch. The function is
    determined once, by running the layers on inputs of 1, 2, 3, ... frames; its period is the subsampling factor.

    outputs : output frames for 0, 1, 2, ... input frames
    width : values of an output frame, if the layers were run
    """

    def __init__(self, outputs: list[int], width: int | None = None):
        self.width = width
        count = len(outputs)
        for factor in range(1, count // 3):
            if all(outputs[t] + 1 == outputs[t + factor] for t in range(count // 3, count - factor)):
                break
        else:
            raise ValueError("the layers do not subsample their input by an integer factor, such as 4")
        self.factor = factor
        for t in reversed(range(1, len(outputs) - self.factor)):  # too short for reflected padding: extrapolate
            outputs[t] = outputs[t] or max(outputs[t + self.factor] - 1, 0)
        self.outputs = outputs  # for integers, since shape checks allow no real tensors
        self.table = torch.tensor(outputs)

    @classmethod
    def identity(cls) -> LengthRule:
        """Return the rule of layers that keep the number of frames."""
        return cls(list(range(_PROBED)))

    @classmethod
    def probe(cls, module: torch.nn.Module, features: int) -> LengthRule:
        """Determine the rule of ``module``, which maps [B, T, features] to [B, T', ...]."""
        # Computing so few frames is ten times faster than working out their shapes on the meta device.
        is_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        device = "meta" if is_meta else "cpu"
        twin = copy.deepcopy(module).to(device).eval()
        outputs, width = [0], None
        with torch.no_grad():
            for frames in range(1, _PROBED):
                try:
                    states = twin(torch.zeros(1, frames, features, device=device))
                    states = states[0] if isinstance(states, tuple) else states
                    outputs.append(states.shape[1])
                    width = states[0, 0].numel()
                except (RuntimeError, ValueError):  # shorter than a kernel or its reflected padding
                    outputs.append(0)
                if frames == _FIRST and all(outputs[_FIRST // 3:]):  # a 0 may be of an input that is too short
                    with contextlib.suppress(ValueError):  # more subsampling
                        return cls(outputs.copy(), width)
        return cls(outputs, width)

    def __call__(self, frames: N) -> N:
        """Return the output frames for input frames: an int, or an integer tensor of any shape and device."""
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
    """Make a mask, True for real frames: [B] -> [B, size]."""
    return torch.arange(size, device=lengths.device)[None, :] < lengths[:, None]


def frame_mean(values: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """Compute the mean of [B, N, F] over the real frames [B] of each utterance: [B]."""
    return (values.mean(2) * lengths_to_mask(frames, values.shape[1])).sum(1) / frames


def centred(x: torch.Tensor, inside: torch.Tensor, count: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract from ``x`` its mean along ``dim`` over valid places; returns that, and the sum of its squares there.

    inside, count : mask of valid places, and their number, both with as many dimensions as ``x``
    """
    centred_x = x - x.masked_fill(~inside, 0.0).sum(dim, keepdim=True) / count
    return centred_x, centred_x.masked_fill(~inside, 0.0).square().sum(dim, keepdim=True)


def takes_lengths(module: torch.nn.Module) -> bool:
    """Whether a module's forward has a second positional argument, for lengths."""
    parameters = inspect.signature(getattr(module, "forward", module)).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1


def feature_frames(features: torch.nn.Module, samples: N, hop: int) -> N:
    """Return the number of feature frames for a number of samples: by the layer's method ``frames`` if it has one,
    otherwise one for each ``hop`` samples, plus one."""
    count_frames = getattr(features, "frames", None)
    return samples // hop + 1 if count_frames is None else count_frames(samples)
