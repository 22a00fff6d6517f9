"""What a recipe gives to training: names for its types, and what any kind of batch holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from sbkit.data.batch import PlannedBatch

# Of types that only the recipe knows.
MicroBatch = Any  # what its data loader yields; its own hooks name the class
Outputs = Any  # what its compute_forward returns
Objectives = Any  # what its compute_objectives returns, such as a Loss or a scalar tensor
DataSource = Any  # a dataset, a data loader, or another iterable of micro-batches


def utterance_ids(batch: object) -> list[str]:
    """Return the ids of a batch's utterances, from ``ids`` (sbkit) or ``id`` (SpeechBrain)."""
    # In a batch that isn't of a plan ``ids`` may be a key of another meaning.
    for name in ("ids", "id") if isinstance(batch, PlannedBatch) else ("id", "ids"):
        found = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        if isinstance(found, (list, tuple)):
            return [str(item) for item in found]
    return []


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in tuples, lists, dicts, dataclasses and batches, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    items: Mapping[Any, object] = {}
    if isinstance(value, Mapping):
        items = value
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        items = dict(zip(getattr(value, "_fields", None) or range(len(value)), value, strict=True))
    elif dataclasses.is_dataclass(value) or type(value).__module__.startswith("speechbrain.dataio."):
        items = {key: item for key, item in vars(value).items() if not key.startswith("_")}
    for key, item in items.items():
        yield from tensors_in(item, f"{path}.{key}" if path else str(key))


def length(batch: object) -> int:
    """Return the number of utterances (or other examples) in a batch; 1 if unknown."""
    names = utterance_ids(batch)
    if names:
        return len(names)
    held = vars(batch) if hasattr(batch, "__dict__") and not isinstance(batch, (torch.Tensor, Mapping)) else batch
    found = [len(tensor) for _, tensor in tensors_in(held) if tensor.dim()]
    return found[0] if found and all(n == found[0] for n in found) else 1


def rows(batch: object, start: int, stop: int) -> object:
    """Return utterances ``start`` to ``stop`` of a batch, with its padding."""
    size = length(batch)
    if isinstance(batch, (torch.Tensor, dict)) or hasattr(batch, "_fields"):
        return _cut(batch, start, stop, size)
    if isinstance(batch, (list, tuple)):
        return type(batch)(_cut(value, start, stop, size) for value in batch)
    # Such lists, and those of keys that a PaddedBatch keeps to itself, may have any length.
    whole = batch.not_by_row if isinstance(batch, PlannedBatch) else frozenset()
    fields = {key: value if key in whole or key.startswith("_") else _cut(value, start, stop, size)
              for key, value in vars(batch).items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **{f.name: fields[f.name] for f in dataclasses.fields(batch) if f.init})
    part = object.__new__(type(batch))
    part.__dict__.update(fields)
    return part


def _cut(value: object, start: int, stop: int, size: int) -> Any:  # of the same type as the value
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.dim() and len(value) == size else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # SpeechBrain's PaddedData, and Padded
        return type(value)(*(_cut(inner, start, stop, size) for inner in value))
    if isinstance(value, (list, tuple)):
        return value[start:stop] if len(value) == size else value
    if isinstance(value, dict):
        return {key: _cut(inner, start, stop, size) for key, inner in value.items()}
    return value
