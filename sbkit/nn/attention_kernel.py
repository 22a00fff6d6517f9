"""Predicts which of torch's attention kernels a GPU runs, by head size; turns cuDNN's off by default."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

logger = logging.getLogger(__name__)

#: Environment variable; set to 1, it allows torch to choose cuDNN's kernel.
CUDNN = "SBKIT_CUDNN_ATTENTION"
#: Fused kernels need head sizes that are a multiple of this; sbkit's layers pad to it.
HEAD_MULTIPLE = 8
_HALF = (torch.float16, torch.bfloat16)


class Kernel(NamedTuple):
    """A kernel for attention, why torch chooses it, and advice if it is slow."""

    name: str
    why: str
    fused: bool  # whether it needs no [T, T] of scores in memory
    fix: str = ""


def leave_cudnn() -> None:
    """Turn cuDNN's attention off, unless ``SBKIT_CUDNN_ATTENTION`` is 1.

    It needs half a second forward and backward to plan for each new shape of a batch, and its gradients have been NaN
    with masks (pytorch#196678). From compute capability 9.0 on, torch prefers it in half precision.
    """
    if os.environ.get(CUDNN) != "1":
        torch.backends.cuda.enable_cudnn_sdp(False)


def kernel(capability: tuple[int, int], dtype: torch.dtype, head: int, cudnn: bool = False) -> Kernel:
    """Return the kernel that torch chooses for attention with a mask.

    capability : the GPU's compute capability
    dtype : of queries and keys
    head : values per head
    cudnn : whether torch may choose cuDNN's kernel
    """
    half = dtype in _HALF
    if cudnn and half and capability >= (8, 0) and head % 8 == 0 and head <= 128:
        return Kernel("cuDNN's", f"{CUDNN}=1 allows it", True)
    if dtype == torch.bfloat16 and capability < (8, 0):
        return Kernel("math", "the card does not compute in bf16", False, "use --precision fp16")
    if capability >= (8, 0):
        multiple = 8 if half else 4
    else:
        multiple = 8 if half and capability >= (7, 0) else 1
    if head % multiple == 0:
        return Kernel("memory-efficient", f"heads of {head}, a multiple of {multiple}", True)
    precision = "half" if half else "full"
    return Kernel("math", f"heads of {head}, but fused ones take multiples of {multiple} in {precision} precision",
                  False, "leave accelerate on, which pads them, or choose nhead so that d_model / nhead is a multiple "
                  f"of {multiple}")


def head_sizes(modules: Iterable[nn.Module]) -> list[int]:
    """Return the head sizes of all attention layers, which have a ``head_dim`` in torch and SpeechBrain."""
    sizes = {getattr(layer, "head_dim", None) for module in modules for layer in module.modules()}
    return sorted(size for size in sizes if isinstance(size, int))


def kernels(modules: Iterable[nn.Module], device: torch.device, precision: str,
            accelerated: bool = True) -> list[Kernel]:
    """Return the kernel for each head size of a model on a CUDA GPU of this machine; none on other devices.

    accelerated : whether the layers are, or will be, replaced by sbkit's
    """
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    cudnn = os.environ.get(CUDNN) == "1" and torch.backends.cuda.cudnn_sdp_enabled() and capability >= (9, 0)
    chosen_kernels = []
    for size in head_sizes(modules):
        padded = size + -size % HEAD_MULTIPLE if accelerated else size
        chosen = kernel(capability, dtype, padded, cudnn=cudnn)
        if padded != size:
            chosen = chosen._replace(why=f"heads of {size}, padded: {chosen.why}")
        chosen_kernels.append(chosen)
    return chosen_kernels


def log_kernel(modules: Iterable[nn.Module], device: torch.device, precision: str, accelerated: bool = True) -> None:
    """Log the attention kernels of a model, with a warning for slow ones."""
    for chosen in kernels(modules, device, precision, accelerated):
        if chosen.fused:
            logger.info("Attention on %s: torch's %s kernel (%s)", device, chosen.name, chosen.why)
        else:
            logger.warning("Attention on %s is slow and keeps all scores [T, T] in memory, because it isn't "
                           "fused (%s); %s",
                           device, chosen.why, chosen.fix)
