"""Checks label and codebook indices before they reach an embedding or a loss."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

# torch.compiler.disable, but without importing the compiler (seconds) before the first call.
from torch._compile import _disable_dynamo

from sbkit.errors import SbkitError
from sbkit.nn.peek import Peek

# The most unread checks; then the oldest is waited for, so that calls that are never polled don't accumulate.
MAX_PENDING = 1024


class IndexTable(NamedTuple):
    """A table in which indices are looked up.

    name : for the message, e.g. "tokens" or "codebook 3"
    size : rows; allowed are 0 .. size-1
    ids : ids of the utterances, for the message
    forbidden : indices inside the table that must not occur, such as the blank among CTC labels
    """

    name: str
    size: int
    ids: Sequence[str] | None = None
    forbidden: tuple[int, ...] = ()

    @property
    def safe(self) -> int:
        """The first allowed index."""
        return next((i for i in range(self.size) if i not in self.forbidden), 0)

    def error(self, shape: torch.Size, count: int, position: int, value: int) -> SbkitError:
        """Make the error for the first of ``count`` bad indices, at a position of a flattened tensor of this shape."""
        row, column = divmod(position, max(1, shape[1:].numel() if len(shape) > 1 else shape.numel()))
        ids = self.ids or ()
        who = f"utterance {ids[row]}" if row < len(ids) else f"row {row}"
        if 0 <= value < self.size and value in self.forbidden:
            wrong = f"index {value} is reserved (blank) and must not occur"
            hint = "was the text encoded with a tokenizer that is not the model's?"
        else:
            wrong = f"index {value} is outside the table of {self.size} (0 to {self.size - 1})"
            hint = "the output layer or codebook must be as large as the tokenizer; in a recipe `sbkit check` " \
                "compares them"
        more = f" ({count} such indices in this batch)" if count > 1 else ""
        return SbkitError("index-out-of-range", f"{self.name}: {who}, position {column}: {wrong}{more}", hint=hint,
                          value=value)


class Checked(NamedTuple):
    """A guarded call on a device."""

    result: torch.Tensor | None  # int64 [3]: the number of bad indices, the flat position of the first, its value
    table: IndexTable
    shape: torch.Size  # of the indices


#: Guarded calls whose results, stacked, are being copied from the device.
_PENDING: deque[tuple[Peek, Sequence[Checked]]] = deque()
#: Those inside ``collecting``.
_collected: list[Checked] | None = None


def pending() -> int:
    """Return the number of guarded calls that haven't been polled."""
    return sum(len(calls) for _, calls in _PENDING)


def poll(wait: bool = False) -> None:
    """Raise ``SbkitError`` for the first guarded call on a device with a bad index that is known so far.

    Polling during logging never waits; ``wait`` is for the end of a stage and before a checkpoint. Each guarded call on
    a device polls too.
    """
    error = None
    while _PENDING:
        peek, calls = _PENDING[0]
        if not wait and not peek.ready:
            break
        _PENDING.popleft()
        for (count, position, value), call in zip(peek.numpy().tolist(), calls, strict=True):
            if count and error is None:
                error = call.table.error(call.shape, count, position, value)
    if error is not None:
        raise error


@contextlib.contextmanager
def collecting() -> Iterator[list[Checked]]:
    """Collect guarded calls inside this context, for ``check_later``, instead of copying their results to the host.

    A CUDA graph computes the results, but the copy and its event can't be part of it.
    """
    global _collected
    before = _collected
    _collected = []
    try:
        yield _collected
    finally:
        _collected = before


def check_later(results: torch.Tensor, calls: Sequence[Checked], ids: Sequence[str] | None = None) -> None:
    """Copy results [N, 3] of guarded calls to the host, without waiting, for ``poll`` to check.

    ids : of the utterances, if they are others than in the calls, which may have them several times
    """
    if ids is not None:
        calls = [_with_ids(call, ids) for call in calls]
    poll(wait=len(_PENDING) >= MAX_PENDING)
    _PENDING.append((Peek(results), calls))


def _with_ids(call: Checked, ids: Sequence[str]) -> Checked:
    """Return a call with the ids of other utterances, as often as it has its own; one without ids stays without."""
    if not call.table.ids:
        return call
    times = len(call.table.ids) // max(1, len(ids))
    return call._replace(table=call.table._replace(ids=[*ids] * times))


@_disable_dynamo
def guard_indices(indices: torch.Tensor, size: int, *, name: str, ids: Sequence[str] | None = None,
                  lengths: torch.Tensor | None = None, forbidden: Sequence[int] = ()) -> torch.Tensor:
    """Return ``indices`` that are safe to look up in a table of ``size`` rows, and report bad ones.

    On the CPU, a bad index raises ``SbkitError`` at once. On a device, bad indices are replaced by a safe one, and the
    result is copied to the host without a sync, for ``poll()`` to raise later. In both cases the message names the
    utterance, the position, the value and the table.

    indices: integers, [B, U] (any shape [B, ...] or [U])
    size, name, ids, forbidden: as in ``IndexTable``
    lengths: [B] int64, valid positions along the second dimension. Padding beyond is replaced by the first allowed
        index, but not reported
    """
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise SbkitError("bad-value", f"{name}: indices must be integers, not {indices.dtype}", key=name)
    table = IndexTable(name, size, ids, tuple(forbidden))
    if indices.device.type != "cpu" or not has_values(indices):
        return guard_on_device(indices, table, lengths)
    values = indices.detach().numpy()  # in numpy, so that it does not count as a host sync
    outside = (values < 0) | (values >= table.size)
    bad = outside | np.isin(values, table.forbidden) if table.forbidden else outside
    if not bad.any():
        return indices
    if lengths is not None:
        inside = np.arange(values.shape[1]) < lengths.detach().cpu().numpy()[:, None]
        bad = bad & inside.reshape(inside.shape + (1,) * (values.ndim - 2))
    if bad.any():
        position = int(bad.argmax())
        raise table.error(indices.shape, int(bad.sum()), position, int(values.flat[position]))
    return indices.masked_fill(torch.from_numpy(outside), table.safe)


def guard_on_device(indices: torch.Tensor, table: IndexTable, lengths: torch.Tensor | None) -> torch.Tensor:
    """Do the same as :func:`guard_indices` if the host doesn't know the values."""
    outside = (indices < 0) | (indices >= table.size)
    bad = outside
    for index in table.forbidden:
        bad = bad | (indices == index)
    if lengths is not None:
        inside = torch.arange(indices.shape[1], device=indices.device) < lengths.to(
            indices.device, non_blocking=True
        ).unsqueeze(1)
        bad = bad & inside.reshape(inside.shape + (1,) * (indices.dim() - 2))
    if indices.numel() and has_values(indices):
        flat = bad.reshape(-1)
        first = flat.int().argmax().unsqueeze(0)
        result = torch.cat([flat.sum().unsqueeze(0), first, indices.reshape(-1).gather(0, first).long()])
        if _collected is None:
            check_later(result.unsqueeze(0), [Checked(None, table, indices.shape)])
        else:
            _collected.append(Checked(result, table, indices.shape))
    return torch.where(outside | bad, table.safe, indices)


def guard_loss(loss: Any) -> Any:  # a value of hparams
    """Return SpeechBrain's CTC loss, as recipes name it, with labels that are checked; anything else as it is.

    For a label without an output, torch reads the value of another frame on a CPU, and trains on it.
    """
    from speechbrain.nnet.losses import ctc_loss

    if not isinstance(loss, functools.partial) or loss.func is not ctc_loss:
        return loss
    return functools.partial(_guarded_ctc_loss, *loss.args, **loss.keywords)


def _guarded_ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, input_lens: torch.Tensor,
                      target_lens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # as SpeechBrain's
    from speechbrain.nnet.losses import ctc_loss

    labels = (target_lens * targets.shape[1]).round().int()
    targets = guard_indices(targets, log_probs.shape[-1], name="CTC labels", lengths=labels)
    return ctc_loss(log_probs, targets, input_lens, target_lens, *args, **kwargs)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values; False for meta and fake tensors."""
    return tensor.device.type != "meta" and type(tensor) in (torch.Tensor, torch.nn.Parameter)
