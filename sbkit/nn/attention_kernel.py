"""Which of torch's attention kernels a card runs for a head size; cuDNN's runs only where it is asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

logger = logging.getLogger(__name__)

#: Set to 1 it leaves the choice between cuDNN's kernel and the others to torch.
CUDNN = "SBKIT_CUDNN_ATTENTION"
#: Fused kernels take heads of a multiple of this in any precision; sbkit's layers pad theirs to one.
WHOLE = 8
_HALF = (torch.float16, torch.bfloat16)


class Kernel(NamedTuple):
    """What computes attention."""

    name: str
    why: str
    fused: bool  # scores stay on the chip: no [T, T] in memory
    mend: str = ""


def leave_cudnn() -> None:
    """Do without cuDNN's attention on cards.

    It plans anew for each shape of a batch, half a second forward and as much backward, and with a mask its gradients
    have been NaN (pytorch#196678). torch takes it first for half precision from compute capability 9.0 on.
    """
    if os.environ.get(CUDNN) != "1":
        torch.backends.cuda.enable_cudnn_sdp(False)


def kernel(capability: tuple[int, int], dtype: torch.dtype, head: int, masked: bool = True, dropout: float = 0.0,
           cudnn: bool = False) -> Kernel:
    """What torch chooses for queries and keys of this type whose heads have ``head`` values.

    capability: the card's; cudnn: whether torch may take cuDNN's
    """
    half = dtype in _HALF
    if cudnn and half and capability >= (8, 0) and head % 8 == 0 and head <= 128 and dropout * 16 % 1 == 0:
        return Kernel("cuDNN's", f"{CUDNN}=1 allows it", True)
    if half and not masked and capability >= (8, 0) and head <= 256:
        return Kernel("flash", "half precision without a mask", True)
    if dtype == torch.bfloat16 and capability < (8, 0):
        return Kernel("math", "the card does not compute in bf16", False, "take --precision fp16")
    whole = (8 if half else 4) if capability >= (8, 0) else (8 if half and capability >= (7, 0) else 1)
    if head % whole == 0:
        return Kernel("memory-efficient", f"heads of {head}, a multiple of {whole}", True)
    precision = "half" if half else "full"
    return Kernel("math", f"heads of {head}, and fused ones take multiples of {whole} in {precision} precision", False,
                  "leave accelerate on, which pads them, or choose nhead so that d_model / nhead is a multiple of "
                  f"{whole}")


def head_sizes(modules: Iterable[nn.Module]) -> list[int]:
    """Of all layers that attend: torch's and SpeechBrain's call it ``head_dim``."""
    found = {getattr(layer, "head_dim", None) for module in modules for layer in module.modules()}
    return sorted(size for size in found if isinstance(size, int))


def kernels(modules: Iterable[nn.Module], device: torch.device, precision: str,
            accelerated: bool = True) -> list[Kernel]:
    """What attends on a card that is at hand, one for each head size; none on other devices.

    accelerated: the layers are sbkit's, or will be
    """
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    cudnn = os.environ.get(CUDNN) == "1" and torch.backends.cuda.cudnn_sdp_enabled() and capability >= (9, 0)
    found = []
    for size in head_sizes(modules):
        padded = size + -size % WHOLE if accelerated else size
        one = kernel(capability, dtype, padded, cudnn=cudnn)
        found.append(one if padded == size else one._replace(why=f"heads of {size}, padded: {one.why}"))
    return found


def tell(modules: Iterable[nn.Module], device: torch.device, precision: str, accelerated: bool = True) -> None:
    """Log what attends, with a warning where that is slow."""
    for found in kernels(modules, device, precision, accelerated):
        if found.fused:
            logger.info("Attention on %s: torch's %s kernel (%s)", device, found.name, found.why)
        else:
            logger.warning("Attention on %s is not fused (%s): it is slow and keeps each [T, T] of scores; %s", device,
                           found.why, found.mend)
