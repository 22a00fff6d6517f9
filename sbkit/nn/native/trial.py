"""Tries sbkit's kernels for GPUs against torch's before they are used, so that wrong ones never train a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def results_agree(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerances: Sequence[float]) -> bool:
    """Whether tensors equal torch's, except for rounding."""
    return all(torch.allclose(mine.detach().cpu().double(), its.detach().cpu().double(), rtol=within, atol=within)
               for mine, its, within in zip(ours, theirs, tolerances, strict=True))


def kernels_agree(device: torch.device, compare: Callable[[], bool], what: str, instead: str = "torch's are") -> bool:
    """Whether kernels compile on a device and agree there with torch on the CPU; if not, the log says why.

    Compiling is needed anyway, and Triton caches the result on disk; the comparison takes a fraction of a second.
    """
    mode = torch.cuda.get_sync_debug_mode()
    if mode:  # only if needed, since torch warns about setting it
        torch.cuda.set_sync_debug_mode(0)  # this comparison may sync
    try:
        with torch.inference_mode(False), torch.enable_grad():
            if compare():
                return True
        reason = "their results differ from torch's"
    except Exception as error:  # e.g. no Triton, no compiler, an unknown card
        reason = f"{type(error).__name__}: {error}"
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)
    logger.warning("sbkit's %s can't be used on %s, so %s: %s", what, device, instead, reason)
    return False
