"""Columns of a corpus that a task declares, besides recordings and texts, and their content in a batch.

Each kind of column is a class, which knows all of it: what a batch has of its rows, and what a dummy batch has. What
either returns moves to a device with the rest of the batch (see ``Batch``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError, shown

#: Pads signals of different lengths with zeros, to [B, S].
Pad = Callable[[Sequence[np.ndarray]], Tensor]


class Padded(NamedTuple):
    """Signals of a batch."""

    data: Tensor
    """``[B, S]`` float32, zero-padded."""
    lengths: Tensor
    """``[B]`` int64, in samples."""


@dataclass(frozen=True)
class TextColumn:
    """A column of texts, one in each row; a row without one is left out of the corpus.

    A kind of your own derives from it and makes something else of the texts: ``of_rows``.

    dummy: the text in dummy batches, with which a recipe is checked.
    """

    dummy: str = field(default="", kw_only=True)

    def of_rows(self, texts: Sequence[str]) -> Any:  # of the kind's own type
        """Make what ``batch.columns`` has of B rows: a list of B values, a tensor with B rows, or named tuples and
        dicts of these."""
        return list(texts)

    def of_dummy(self, count: int) -> Any:  # as above
        """Make the same for the rows of a dummy batch."""
        return self.of_rows([self.dummy] * count)


@dataclass(frozen=True)
class LabelColumn(TextColumn):
    """A column of labels, such as speakers: ``batch.columns`` has B texts.

    classes: the recipe's key that lists all labels of the training set; a run fills the list if it is null.
        ``batch.labels`` then has the index of each text in it, ``[B]`` int64; -1 in dev and test for an unknown one.
    dummy: the text in dummy batches, with which a recipe is checked.
    """

    classes: str | None = None

    def __repr__(self) -> str:
        # The fingerprint of a prepared corpus holds this text, so the field keeps its former name here: with another
        # text, every corpus with labels would be prepared again.
        return f"LabelColumn(classes={self.classes!r}, stand_in={self.dummy!r})"

    def numbers(self, texts: Sequence[str], index_of: Mapping[str, int], count: int) -> Tensor:
        """Return ``labels`` of a batch.

        index_of : the index of each label in the recipe's list
        count : the rows that are utterances; those behind them fill a shape, and are of the first class
        """
        numbers = torch.tensor([index_of.get(text, -1) for text in texts])
        numbers[count:] = 0
        return numbers

    def dummy_numbers(self, classes: int, count: int, *, noise: bool) -> Tensor:
        """Make valid ``labels`` of a dummy batch; with ``noise``, random ones.

        classes : the number of labels in the recipe's list; 0: the corpus isn't prepared yet
        """
        if noise:
            return torch.randint(max(1, classes), (count,))
        return torch.zeros(count, dtype=torch.long)


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

    def of_rows(self, signals: Sequence[np.ndarray], pad: Pad) -> Padded:
        """Make what ``batch.columns`` has of B signals that were read."""
        return Padded(pad(signals), torch.tensor([len(signal) for signal in signals]))

    def of_dummy(self, signals: Tensor, lengths: Tensor, *, noise: bool) -> Padded:
        """Make the same for a dummy batch with these signals; with ``noise``, of random samples."""
        data = 0.1 * torch.randn(signals.shape) if noise else signals.clone()
        return Padded(data, lengths.clone())


#: What a task declares: columns by name.
Declared = Mapping[str, TextColumn | SignalColumn]


def defaults_to_recording(column: TextColumn | SignalColumn) -> bool:
    """Whether a column that a corpus lacks is the row's own recording."""
    return isinstance(column, SignalColumn) and column.or_recording


class BatchColumns:
    """The columns that a task declares, with the classes that its recipe lists."""

    def __init__(self, declared: Declared, keys: object = None):
        corpus = vars(keys).get("corpus") if hasattr(keys, "__dict__") else None
        self._tags: Declared = getattr(corpus, "tags", {})  # a mixture's
        self.declared: Declared = {**self._tags, **declared}
        self.signals = {name: column for name, column in self.declared.items() if isinstance(column, SignalColumn)}
        self.texts = {name: column for name, column in self.declared.items() if isinstance(column, TextColumn)}
        self._labels = {name: column for name, column in self.texts.items()
                        if isinstance(column, LabelColumn) and column.classes is not None}
        self.classes = {name: self._listed(name, keys) for name in self._labels}
        """The classes that the recipe lists, by column; empty if the corpus isn't prepared yet."""
        self._index_of = {name: {label: index for index, label in enumerate(listed)}
                          for name, listed in self.classes.items()}

    def _key(self, name: str) -> str:
        """The recipe's key that lists the classes of a column of labels."""
        key = self._labels[name].classes
        assert key is not None, "these are the columns that name one"
        return key

    def _listed(self, name: str, keys: object) -> Sequence[str]:
        """The classes that the recipe lists for a column of labels."""
        key = self._key(name)
        listed = getattr(keys, key) if hasattr(keys, key) else ()
        if listed is None:  # the corpus isn't prepared yet
            return []
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
            raise SbkitError("bad-value", f"{key} is {shown(listed)}",
                             hint=f"expected the list of all values of the column {name}", key=key, value=listed)
        return [str(value) for value in listed]

    def list_classes(self, train: Manifest) -> dict[str, list[str]]:
        """List the labels of a training set by key, for keys that are null in the recipe."""
        return {self._key(name): sorted(set(train.column(name)))
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
                raise SbkitError("unlisted-label", f"{self._key(name)} doesn't list {shown(column[row])}, the {name} "
                                 f"of {train.ids[row]} and of {int((~is_listed).sum()) - 1:,} more rows of the "
                                 "training set", hint="list all of them", key=self._key(name), value=column[row])

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

    def of_rows(self, texts: Mapping[str, Sequence[str]], signals: Mapping[str, Sequence[np.ndarray]], count: int,
                pad: Pad) -> dict[str, Any]:
        """Make ``columns`` and ``labels`` of a batch from what was read of its rows, by column.

        count : the rows that are utterances; those behind them fill a shape
        pad : pads the signals of a column
        """
        columns: dict[str, Any] = {name: column.of_rows(texts[name]) for name, column in self.texts.items()}
        for name, column in self.signals.items():
            columns[name] = column.of_rows(signals[name], pad)
        labels = {name: column.numbers(texts[name], self._index_of[name], count)
                  for name, column in self._labels.items()}
        return {"columns": columns, "labels": labels}

    def dummy(self, signals: Tensor, lengths: Tensor, *, noise: bool = False) -> dict[str, Any]:
        """Make valid ``columns`` and ``labels`` for a dummy batch of these signals; with ``noise``, random ones."""
        count = len(signals)
        columns: dict[str, Any] = {}
        for name, column in self.declared.items():
            if isinstance(column, SignalColumn):
                columns[name] = column.of_dummy(signals, lengths, noise=noise)
            else:
                columns[name] = column.of_dummy(count)
        labels = {name: column.dummy_numbers(len(self.classes[name]), count, noise=noise)
                  for name, column in self._labels.items()}
        return {"columns": columns, "labels": labels}
