"""Batches of noise, as a loader makes them of recordings."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from sbkit.data.batch import Batch


def noise(*lengths: int, tokens: Sequence[Sequence[int]] | None = None, level: float = 0.1, **more: Any) -> Batch:
    """Utterances of so many samples, called a, b, ...; those of a length are the same in any batch.

    tokens : of each; None: the task has none
    """
    count = len(lengths)
    signals = [level * torch.randn(length, generator=torch.Generator().manual_seed(length)) for length in lengths]
    ids = [torch.tensor(each, dtype=torch.long) for each in tokens or [[]] * count]
    return Batch(**{
        "ids": list(ascii_lowercase[:count]), "texts": [""] * count, "samples": sum(lengths),
        "signals": pad_sequence(signals, batch_first=True), "signal_lengths": torch.tensor(lengths),
        "tokens": pad_sequence(ids, batch_first=True), "token_lengths": torch.tensor([len(each) for each in ids]),
        **more})


def tensors_by_field(batch):
    """What kind of tensor each field of a batch holds: its type of numbers and how many dimensions."""
    return {name: (value.dtype, value.dim()) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
