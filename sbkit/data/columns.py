"""Columns of a corpus that a task declares, besides recordings and texts, and their content in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError, shown


@dataclass(frozen=True)
class LabelColumn:
    """A column of labels, such as speakers: ``batch.columns`` has B texts.

    classes: the recipe's key that lists all labels of the training set; a run fills the list if it is null.
        ``batch.labels`` then has the index of each text in it, ``[B]`` int64; -1 in dev and test for an unknown one.
    dummy: the text in dummy batches, with which a recipe is checked.
    """

    classes: str | None = None
    dummy: str = ""

    def __repr__(self) -> str:
        # The fingerprint of a prepared corpus holds this text, so the field keeps its former name here: with another
        # text, every corpus with labels would be prepared again.
        return f"LabelColumn(classes={self.classes!r}, stand_in={self.dummy!r})"


@dataclass(frozen=True)
class SignalColumn:
    """A column of recordings, such as clean versions of noisy ones: ``batch.columns`` has ``Padded`` signals.

    aligned: whether it has the same segment and speed as the row's recording. ``aligned`` augmentations (``Crop``,
        ``Gain``) change both alike, and others only the row's recording. False: it is read whole, may have another
        length, and isn't augmented.
    or_recording: whether a corpus may lack this column. It is then the row's own recording, without augmentations that
        aren't aligned, such as noise.
    """

    aligned: bool = True
    or_recording: bool = False

    def __post_init__(self) -> None:
        if self.or_recording and not self.aligned:
            raise ValueError("a row's own recording is aligned with it")


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
        corpus = vars(keys).get("corpus") if hasattr(keys, "__dict__") else None
        self._tags: Declared = getattr(corpus, "tags", {})  # a mixture's
        self.declared: Declared = {**self._tags, **declared}
        self.signals = {name: column for name, column in self.declared.items() if isinstance(column, SignalColumn)}
        self.texts = {name: column.classes for name, column in self.declared.items() if isinstance(column, LabelColumn)}
        """The recipe's key for the classes of each column of labels; None: it has none."""
        self.classes: dict[str, Sequence[str]] = {}
        for name, key in self.texts.items():
            if key is None:
                continue
            listed = getattr(keys, key) if hasattr(keys, key) else ()
            if listed is None:  # the corpus isn't prepared yet
                self.classes[name] = []
                continue
            if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
                raise SbkitError(f"{key} is {shown(listed)}",
                                 hint=f"expected the list of all values of the column {name}")
            self.classes[name] = [str(value) for value in listed]
        self._numbers = {name: {value: i for i, value in enumerate(values)} for name, values in self.classes.items()}

    def list_classes(self, train: Manifest) -> dict[str, list[str]]:
        """List the labels of a training set by key, for keys that are null in the recipe."""
        return {str(self.texts[name]): sorted(set(train.column(name)))
                for name, values in self.classes.items() if not values}

    def check_classes(self, train: Manifest) -> None:
        """Refuse a training set with a label that the recipe doesn't list."""
        for name, values in self.classes.items():
            if not values:
                continue
            column = train.column(name)
            is_listed = column.is_in(values)
            if not is_listed.all():
                row = int(np.flatnonzero(~is_listed)[0])
                raise SbkitError(
                    f"{self.texts[name]} doesn't list {shown(column[row])}, the {name} of {train.ids[row]} and of "
                    f"{int((~is_listed).sum()) - 1:,} more rows of the training set", hint="list all of them")

    def longest(self, manifest: Manifest, durations: np.ndarray) -> np.ndarray:
        """The longest signal of each row, in seconds, where ``durations`` are those of the rows' recordings."""
        for name, column in self.signals.items():
            if not column.aligned:
                durations = np.maximum(durations, manifest.seconds(name))
        return durations

    def text(self, manifest: Manifest, name: str, row: int) -> str:
        """Return a row's text in a column of labels; empty if a manifest of another corpus lacks a mixture's column."""
        return "" if name in self._tags and name not in manifest.meta else manifest.column(name)[row]

    # A batch has its columns from one of these two, which a field of a batch is added to.

    def of_rows(self, texts: Mapping[str, list[str]], signals: Mapping[str, Padded], count: int) -> dict[str, Any]:
        """Make ``columns`` and ``labels`` of a batch from what was read of its rows, by column.

        count : the rows that are utterances; those behind them fill a shape, and are of the first class
        """
        labels: dict[str, Tensor] = {}
        for name, number_of in self._numbers.items():
            labels[name] = torch.tensor([number_of.get(text, -1) for text in texts[name]])
            labels[name][count:] = 0
        return {"columns": {**texts, **signals}, "labels": labels}

    def dummy(self, signals: Tensor, lengths: Tensor, *, noise: bool = False) -> dict[str, Any]:
        """Make valid ``columns`` and ``labels`` for a dummy batch of these signals; with ``noise``, random ones."""
        count = len(signals)
        columns: dict[str, Any] = {}
        for name, column in self.declared.items():
            if isinstance(column, SignalColumn):
                data = 0.1 * torch.randn(signals.shape) if noise else signals.clone()
                columns[name] = Padded(data, lengths.clone())
            else:
                columns[name] = [column.dummy] * count

        labels: dict[str, Tensor] = {}
        for name, values in self.classes.items():
            if noise:
                labels[name] = torch.randint(max(1, len(values)), (count,))
            else:
                labels[name] = torch.zeros(count, dtype=torch.long)
        return {"columns": columns, "labels": labels}
