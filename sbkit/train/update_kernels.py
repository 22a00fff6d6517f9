"""Updates of weights by compiled kernels, on CPUs: one pass over all gradients for their norm, and one that updates.

A kernel takes all tensors of a list in one call. ``fit`` says whether it can; otherwise torch computes the same, in a
pass for each operation. The C functions are in ``sbkit/nn/native/update.h``; their arguments are above each call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from ctypes import c_double, c_float, c_int64, c_void_p
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.nn.native import library
from sbkit.train.distributed import ranks

_agreed: bool | None = None  # whether every rank has the kernels; None: not asked yet


def available() -> bool:
    """Return whether the kernels are loaded, on all ranks; the first call loads them.

    They are loaded here, and not only where layers use them: what an update computes must not depend on which models
    this process has trained before. All ranks make the first call together: ranks that round differently would no
    longer have the same weights.
    """
    global _agreed
    if not library.decided():
        library.load()
    if ranks.world_size() == 1:
        return library.loaded()
    if _agreed is None:
        _agreed = not ranks.any_of({"missing": not library.loaded()})["missing"]
    return _agreed


def fit(*lists: Iterable[Tensor]) -> bool:
    """Return whether kernels take tensors: float32 ones on the CPU without gaps, neither sharded nor fake."""
    for tensors in lists:
        for tensor in tensors:
            is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.dtype is torch.float32
            if not (is_plain and tensor.is_cpu and tensor.is_contiguous()):
                return False
    return True


def norm(grads: Sequence[Tensor]) -> float:
    """Return the norm of all gradients as one vector."""
    blocks = _Blocks(grads)
    sums = (c_double * blocks.count)()
    # sum_squares(tensors, out, lengths, starts, count, threads)
    library.call(
        "sum_squares", torch.float32,
        tensors=_addresses(grads),
        out=sums,
        **blocks.arguments,
    )
    return math.sqrt(sum(sums))


def move_momenta(grads: Sequence[Tensor], momenta: Sequence[Tensor], ahead: Sequence[Tensor | None],
                 dtype: torch.dtype, divisor: float, momentum: float, tiny: float) -> None:
    """Let momenta follow gradients that are to be divided by ``divisor``.

    ahead : for some of them a tensor in ``dtype``, which becomes Nesterov's momentum, divided by its norm, or by
        ``tiny`` if that is larger
    """
    blocks = _Blocks(grads)
    # momentum(grads, moments, ahead, divisor, momentum, tiny, sums, lengths, starts, count, threads)
    library.call(
        "momentum", dtype,
        grads=_addresses(grads),
        moments=_addresses(momenta),
        ahead=_addresses(ahead),
        divisor=divisor,
        momentum=momentum,
        tiny=tiny,
        sums=(c_double * blocks.count)(),
        **blocks.arguments,
    )


def move_weights(weights: Sequence[Tensor], updates: Sequence[Tensor | None], factors: Sequence[float],
                 directions: Sequence[Tensor | None], dtype: torch.dtype, keep: float, step: float) -> None:
    """Multiply weights by ``keep``, and add their directions times ``step``.

    updates : for some weights a tensor in ``dtype``, which times its factor is the new direction
    directions : where directions are stored; None for a weight whose direction is not
    """
    assert all(update is None or (update.dtype == dtype and update.is_contiguous()) for update in updates)
    blocks = _Blocks(weights)
    # move(weights, updates, factors, directions, keep, step, lengths, starts, count, threads)
    library.call(
        "move", dtype,
        weights=_addresses(weights),
        updates=_addresses(updates),
        factors=(c_float * len(factors))(*factors),
        directions=_addresses(directions),
        keep=keep,
        step=step,
        **blocks.arguments,
    )
    torch.autograd.graph.increment_version(weights)  # so that a backward through earlier values is an error


def adamw(weights: Sequence[Tensor], states: Sequence[dict[str, Any]], grads: Sequence[Tensor], divisor: float,
          lr: float, betas: tuple[float, float], weight_decay: float, eps: float) -> None:
    """Take a step of AdamW on gradients that are to be divided by ``divisor``."""
    beta1, beta2 = betas
    blocks = _Blocks(weights)
    # adamw(weights, grads, means, variances, steps, divisor, lr, beta1, beta2, decay, eps,
    #       lengths, starts, count, threads)
    library.call(
        "adamw", torch.float32,
        weights=_addresses(weights),
        grads=_addresses(grads),
        means=_addresses([state["exp_avg"] for state in states]),
        variances=_addresses([state["exp_avg_sq"] for state in states]),
        steps=_addresses([state["step"] for state in states]),
        divisor=divisor,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        decay=weight_decay,
        eps=eps,
        **blocks.arguments,
    )
    torch.autograd.graph.increment_version(weights)


class _Blocks:
    """The blocks of up to ``BLOCK`` values that kernels divide a list of tensors into, among threads.

    With a BLOCK of 4096, tensors of 5000, 0 and 10 values have 2, 0 and 1 blocks, so they start at block 0, 2 and 2:

        lengths = 5000, 0, 10        starts = 0, 2, 2, 3        count = 3 tensors
    """

    def __init__(self, tensors: Sequence[Tensor]):
        lengths = [tensor.numel() for tensor in tensors]
        starts = [0, *accumulate(-(-length // library.BLOCK) for length in lengths)]
        self.count = starts[-1]
        """The number of blocks of all tensors."""
        self.arguments: dict[str, Any] = {
            "lengths": (c_int64 * len(lengths))(*lengths),
            "starts": (c_int64 * len(starts))(*starts),
            "count": len(lengths),
            "threads": torch.get_num_threads(),
        }
        """What every kernel over a list of tensors takes."""


def _addresses(tensors: Sequence[Tensor | None]) -> Any:  # an array of ctypes, whose type has no name
    """Return an array of the addresses of tensors' values, null for None."""
    return (c_void_p * len(tensors))(*[None if tensor is None else tensor.data_ptr() for tensor in tensors])
