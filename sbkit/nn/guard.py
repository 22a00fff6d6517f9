"""Checks label and codebook indices before they reach an embedding or a loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# torch.compiler.disable, but without importing the compiler (seconds) before the first call.
from torch._compile import _disable_dynamo

from sbkit.errors import SbkitError
from sbkit.nn.peek import Peek

# With this many unread checks the oldest is waited for, so that a log that is never polled does not grow for ever.
MAX_PENDING = 1024


@dataclass
class _Check:
    """A guarded call whose verdict is being copied from the device."""

    peek: Peek  # int64 [3]: number of bad indices, flat position of the first, its value
    width: int
    size: int
    name: str
    ids: Sequence[str] | None
    forbidden: tuple[int, ...]


class GuardLog:
    """Collects the verdicts of guarded calls on a device.

    Call ``poll()`` where a run logs: it never waits, and raises for the first bad index known so far. Call
    ``poll(wait=True)`` at the end of a stage and before a checkpoint. Each guarded call on a device polls too.
    """

    def __init__(self) -> None:
        self._pending: deque[_Check] = deque()
        self._found: SbkitError | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, check: _Check) -> None:
        self.poll(wait=len(self._pending) >= MAX_PENDING)
        self._pending.append(check)

    def poll(self, wait: bool = False) -> None:
        """Raise ``SbkitError`` if a guarded index was outside its table; with ``wait``, for all calls so far."""
        self._drain(wait)
        if self._found is not None:
            found, self._found = self._found, None
            raise found

    def clear(self) -> None:
        self._pending.clear()
        self._found = None

    def _drain(self, wait: bool) -> None:
        while self._pending and (wait or self._pending[0].peek.ready):
            check = self._pending.popleft()
            count, position, value = check.peek.numpy().tolist()
            if count and self._found is None:
                row, column = divmod(position, check.width)
                self._found = _complaint(check.name, check.size, check.forbidden, count, row, column, value,
                                         check.ids)


LOG = GuardLog()
"""The log of this process; ``sbkit.Brain`` polls it."""


def poll(wait: bool = False) -> None:
    """Raise ``SbkitError`` if a guarded call on a device met a bad index (see ``GuardLog.poll``)."""
    LOG.poll(wait)


@_disable_dynamo
def guard_indices(
    indices: torch.Tensor,
    size: int,
    *,
    name: str,
    ids: Sequence[str] | None = None,
    lengths: torch.Tensor | None = None,
    forbidden: Sequence[int] = (),
    log: GuardLog | None = None,
) -> torch.Tensor:
    """Return ``indices`` made safe to look up in a table of ``size`` rows, and report bad ones.

    On the CPU, a bad index raises ``SbkitError`` at once. On a device, bad indices are replaced by a safe one, and a
    verdict is copied to ``log`` without a host sync, for ``poll()`` to raise later. In both cases the message names the
    utterance, the position, the value and the table.

    Arguments
    ---------
    indices: integers, [B, U] (any shape [B, ...] or [U])
    size: rows of the table; allowed are 0 .. size-1
    name: the table's name for the message, e.g. "tokens" or "codebook 3"
    ids: names of the B utterances, for the message
    lengths: [B] int64, valid positions along the second dimension. What lies beyond is padding, which is made safe
        (the first allowed index) but not reported
    forbidden: indices inside the table that must not occur, such as the blank among CTC labels
    """
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise SbkitError(f"{name}: indices must be integers, got {indices.dtype}")
    forbidden = tuple(forbidden)
    safe = next((i for i in range(size) if i not in forbidden), 0)
    if indices.device.type == "cpu" and type(indices) in (torch.Tensor, torch.nn.Parameter):
        return _guard_on_host(indices, size, name, ids, lengths, forbidden, safe)
    return guard_on_device(indices, size, name, ids, lengths, forbidden, safe, LOG if log is None else log)


def _guard_on_host(
    indices: torch.Tensor, size: int, name: str, ids: Sequence[str] | None, lengths: torch.Tensor | None,
    forbidden: tuple[int, ...], safe: int,
) -> torch.Tensor:
    values = indices.detach().numpy()  # in numpy, so that it does not count as a host sync
    outside = (values < 0) | (values >= size)
    bad = outside | np.isin(values, forbidden) if forbidden else outside
    if not bad.any():
        return indices
    if lengths is not None:
        inside = np.arange(values.shape[1]) < lengths.detach().cpu().numpy()[:, None]
        bad = bad & inside.reshape(inside.shape + (1,) * (values.ndim - 2))
    if bad.any():
        position = int(bad.argmax())
        row, column = divmod(position, _width(indices))
        raise _complaint(name, size, forbidden, int(bad.sum()), row, column, int(values.flat[position]), ids)
    return indices.masked_fill(torch.from_numpy(outside), safe)


def guard_on_device(
    indices: torch.Tensor, size: int, name: str, ids: Sequence[str] | None, lengths: torch.Tensor | None,
    forbidden: tuple[int, ...], safe: int, log: GuardLog,
) -> torch.Tensor:
    outside = (indices < 0) | (indices >= size)
    bad = outside
    for index in forbidden:
        bad = bad | (indices == index)
    if lengths is not None:
        inside = torch.arange(indices.shape[1], device=indices.device) < lengths.to(
            indices.device, non_blocking=True
        ).unsqueeze(1)
        bad = bad & inside.reshape(inside.shape + (1,) * (indices.dim() - 2))
    if indices.numel() and has_values(indices):
        flat = bad.reshape(-1)
        first = flat.int().argmax().unsqueeze(0)
        verdict = torch.cat([flat.sum().unsqueeze(0), first, indices.reshape(-1).gather(0, first).long()])
        log.add(_Check(Peek(verdict), _width(indices), size, name, ids, forbidden))
    return torch.where(outside | bad, safe, indices)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values; False for meta and fake tensors."""
    return tensor.device.type != "meta" and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _width(indices: torch.Tensor) -> int:
    return max(indices[0].numel(), 1) if indices.dim() > 1 else max(indices.numel(), 1)


def _complaint(
    name: str, size: int, forbidden: tuple[int, ...], count: int, row: int, column: int, value: int,
    ids: Sequence[str] | None,
) -> SbkitError:
    who = f"utterance {ids[row]}" if ids is not None and row < len(ids) else f"row {row}"
    if 0 <= value < size and value in forbidden:
        wrong = f"index {value} is reserved (blank) and must not occur"
        hint = "was the text encoded with a tokenizer that is not the model's?"
    else:
        wrong = f"index {value} is outside the table of {size} (0 to {size - 1})"
        hint = "the output layer or codebook must be as large as the tokenizer; run `sbkit check`, which compares them"
    more = f" ({count} such indices in this batch)" if count > 1 else ""
    return SbkitError(f"{name}: {who}, position {column}: {wrong}{more}", hint=hint)
