"""Full precision inside autocast, for what bf16 would spoil: Fourier transforms, logarithms of power, phases."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def exact(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Context in which layers on a tensor's device compute in fp32; an exported graph shows no trace of it."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()
