"""Columns of a corpus that a task declares, besides recordings and texts, and what a batch holds of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError, shown


@dataclass(frozen=True)
class LabelColumn:
    """A column of labels, such as speakers: a batch has B texts, or numbers ``[B]`` int64.

    Arguments
    ---------
    classes: the key of the recipe whose list has all labels of the training set; a batch then has each label's place
        there, and -1 in dev and test for a label that it doesn't have. ``None``: the texts.
    """

    classes: str | None = None


@dataclass(frozen=True)
class SignalColumn:
    """A column of recordings, such as the clean one of a noisy one: a batch has ``Padded`` signals.

    Arguments
    ---------
    aligned: whether it is cut out of its file as the row's recording is, and read at the same speed; augmentations
        that are ``aligned`` (``Crop``, ``Gain``) change both alike, and others only the row's recording. False: it is
        read whole, has a length of its own, and isn't augmented.
    """

    aligned: bool = True


#: What a task declares: columns by name.
Declared = Mapping[str, LabelColumn | SignalColumn]


class Padded(NamedTuple):
    """Signals of a batch."""

    data: Tensor
    """``[B, S]`` float32, zero-padded."""
    lengths: Tensor
    """``[B]`` int64, in samples."""


class BatchColumns:
    """The columns that a task declares, with the classes that its recipe lists."""

    def __init__(self, declared: Declared, keys: object = None):
        self.declared = dict(declared)
        self.signals = {name: column for name, column in declared.items() if isinstance(column, SignalColumn)}
        self.labels = {name: column.classes for name, column in declared.items() if isinstance(column, LabelColumn)}
        self.classes: dict[str, Sequence[str]] = {}
        for name, key in self.labels.items():
            if key is None:
                continue
            listed = getattr(keys, key, None)
            if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
                raise SbkitError(f"{key} is {shown(listed)}",
                                 hint=f"the task needs the list of all values of the column {name} there")
            self.classes[name] = [str(value) for value in listed]
        self._numbers = {name: {value: i for i, value in enumerate(values)} for name, values in self.classes.items()}

    def check_classes(self, train: Manifest) -> None:
        """Refuse a training set with a label that the recipe doesn't list."""
        for name, values in self.classes.items():
            column = train.column(name)
            known = pc.is_in(column.arrow, pa.array(values, pa.large_string())).to_numpy(zero_copy_only=False)
            if not known.all():
                row = int(np.flatnonzero(~known)[0])
                raise SbkitError(
                    f"{self.labels[name]} doesn't list {shown(column[row])}, the {name} of {train.ids[row]} and of "
                    f"{int((~known).sum()) - 1:,} more rows of the training set", hint="list all of them")

    def longest(self, manifest: Manifest, durations: np.ndarray) -> np.ndarray:
        """The longest signal of each row, in seconds, where ``durations`` are those of the rows' recordings."""
        for name, column in self.signals.items():
            if not column.aligned:
                durations = np.maximum(durations, manifest.seconds(name))
        return durations

    def label(self, name: str, values: Sequence[str]) -> Tensor | list[str]:
        """What a batch has of a column of labels with these values."""
        if name not in self._numbers:
            return list(values)
        return torch.tensor([self._numbers[name].get(value, -1) for value in values])

    def stand_in(self, signals: Tensor, lengths: Tensor, *, noise: bool = False) -> dict[str, Any]:
        """Make valid columns for a batch of these signals that has no corpus; with ``noise``, random ones."""
        found: dict[str, Any] = {}
        for name in self.declared:
            if name in self.signals:
                found[name] = Padded(0.1 * torch.randn(signals.shape) if noise else signals.clone(), lengths.clone())
            elif name in self.classes:
                found[name] = torch.randint(len(self.classes[name]) if noise else 1, (len(signals),))
            else:
                found[name] = [""] * len(signals)
        return found
