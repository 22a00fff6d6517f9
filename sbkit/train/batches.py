"""What a recipe gives to training: names for its types, and what any kind of batch holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sbkit.data.batch import PlannedBatch

# Of types that only the recipe knows.
MicroBatch = Any  # what its data loader yields; its own hooks name the class
Outputs = Any  # what its compute_forward returns
Objectives = Any  # what its compute_objectives returns, such as a Loss or a scalar tensor
DataSource = Any  # a dataset, a data loader, or another iterable of micro-batches


class KeptBatch(NamedTuple):
    """A micro-batch, and the state of the random generators (``rng.capture``) before it was run, if known.

    With both, a step that was not finite can be run again.
    """

    batch: MicroBatch
    rng: Mapping[str, torch.Tensor] | None = None


def is_last(batch: object) -> bool | None:
    """Return whether a batch is the last of its step; None if it doesn't say, as only the batches of a plan do."""
    return batch.last if isinstance(batch, PlannedBatch) else None


def utterance_ids(batch: object) -> list[str]:
    """Return the ids of a batch's utterances, from ``ids`` (sbkit) or ``id`` (SpeechBrain)."""
    # In a batch that isn't of a plan ``ids`` may be a key of another meaning.
    names = ("ids", "id") if isinstance(batch, PlannedBatch) else ("id", "ids")
    for name in names:
        ids = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        if isinstance(ids, (list, tuple)):
            return [str(item) for item in ids]
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
    ids = utterance_ids(batch)
    if ids:
        return len(ids)
    is_object = hasattr(batch, "__dict__") and not isinstance(batch, (torch.Tensor, Mapping))
    content = vars(batch) if is_object else batch
    lengths = {len(tensor) for _, tensor in tensors_in(content) if tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else 1


def rows(batch: object, start: int, stop: int) -> object:
    """Return utterances ``start`` to ``stop`` of a batch of any kind, with its padding."""
    size = length(batch)

    def cut(value: object) -> Any:  # of the same type as the value
        """Cut what has a row for each utterance; all else stays as it is."""
        if isinstance(value, torch.Tensor):
            return value[start:stop] if value.dim() and len(value) == size else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # SpeechBrain's PaddedData, and Padded
            return type(value)(*map(cut, value))
        if isinstance(value, (list, tuple)):
            return value[start:stop] if len(value) == size else value
        if isinstance(value, dict):
            return {key: cut(inner) for key, inner in value.items()}
        return value

    if isinstance(batch, (torch.Tensor, dict)) or hasattr(batch, "_fields"):
        return cut(batch)
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(cut, batch))

    # Such lists, and those of keys that a PaddedBatch keeps to itself, may have any length.
    without_rows = batch.not_by_row if isinstance(batch, PlannedBatch) else frozenset()
    fields = {}
    for name, value in vars(batch).items():
        fields[name] = value if name in without_rows or name.startswith("_") else cut(value)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        arguments = {field.name: fields[field.name] for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **arguments)
    part = object.__new__(type(batch))
    vars(part).update(fields)
    return part
