"""The test set of a script: its rows, alone or in batches as the script collates them."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from speechbrain.dataio.batch import PaddedData
from speechbrain.dataio.dataset import DynamicItemDataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sbkit.errors import SbkitError
from sbkit.train.batches import DataSource

Row = dict[str, Any]  # the values that the dataset gives for a recording, by output key
Batch = Any  # what a script's collate function makes

#: Fewer values of a recording than this are no waveform.
_SHORTEST_SIGNAL = 400


class TestSet:
    """The rows of a script's test, which must come from a ``DynamicItemDataset``.

    loader : that the script's ``evaluate`` goes through
    signal_key : the output key with the waveforms; None: the only one that has some
    """

    __test__ = False  # pytest would collect a class of this name

    def __init__(self, loader: DataSource, signal_key: str | None = None):
        dataset = getattr(loader, "dataset", None)
        collate = getattr(loader, "collate_fn", None)
        if not isinstance(dataset, DynamicItemDataset) or collate is None:
            raise SbkitError("script-test-set", f"the script tests on a {type(dataset or loader).__name__}, and only "
                             "SpeechBrain's DynamicItemDataset is supported",
                             hint="give evaluate a DynamicItemDataset, or a data loader of one")
        self.loader = loader
        self.dataset = dataset
        self.collate: Callable[[Sequence[Row]], Any] = collate
        self.signal_key = self._check_signal_key(signal_key)

    def __len__(self) -> int:
        return len(self.dataset)

    def row(self, index: int) -> Row:
        """Return the output values of a row."""
        row: Row = self.dataset[index]
        return row

    def id(self, index: int) -> str:
        """Return a row's id."""
        return str(self.dataset.data_ids[index])

    def listed(self, index: int) -> Row:
        """Return what the script's list has of a row, such as the columns of its CSV."""
        return dict(self.dataset.data[self.dataset.data_ids[index]])

    def duration(self, index: int) -> float | None:
        """Return the seconds of a row's recording by the script's list; None if that has none."""
        try:
            return float(self.listed(index)["duration"])
        except (KeyError, TypeError, ValueError):
            return None

    def batch(self, index: int) -> Batch:
        """Collate a row alone."""
        return self.collate([self.row(index)])

    def signal(self, index: int) -> Tensor:
        """Return a row's waveform [S]."""
        data, _ = getattr(self.batch(index), self.signal_key)
        return data[0]

    def evenly_by_length(self, count: int) -> list[int]:
        """Choose ``count`` rows from the shortest to the longest, as far as the script's list has their durations."""
        rows = list(range(len(self)))
        seconds = {row: duration for row in rows if (duration := self.duration(row)) is not None}
        if len(seconds) == len(rows):
            rows.sort(key=seconds.__getitem__)
        places = torch.linspace(0, len(rows) - 1, min(count, len(rows))).round().long().unique()
        return [rows[place] for place in places.tolist()]

    def wav(self, index: int) -> str:
        """Return the path of a row's recording: the column of the script's list that names a file; empty if none does.
        """
        for value in self.listed(index).values():
            if isinstance(value, str) and os.path.sep in value and os.path.isfile(value):
                return value
        return ""

    def batches(self, workers: int | None = None) -> Iterator[tuple[list[int], Any]]:
        """Yield all rows in batches as the script's loader makes them, each with the rows' indices.

        workers : processes that read them; None: as the script says
        """
        loader = DataLoader(
            _Numbered(self.dataset), batch_sampler=self.loader.batch_sampler,
            num_workers=self.loader.num_workers if workers is None else workers,
            collate_fn=functools.partial(_collate, self.collate))
        yield from loader

    def _check_signal_key(self, wanted: str | None) -> str:
        """Find the key of the waveforms in a batch; raises if there are none or several."""
        batch = self.batch(0)
        found = [key for key, value in values_of(batch).items() if _is_signal(value)]
        if wanted is not None:
            if wanted not in found:
                raise SbkitError("script-signal", f"sbkit_export: signal is {wanted!r}, but a batch has waveforms "
                                 f"under {', '.join(found) or 'no key'}", key="signal", value=wanted,
                                 hint="name an output key of the dataset with waveforms [B, S]")
            return wanted
        if len(found) != 1:
            problem = f"several keys with waveforms: {', '.join(found)}" if found else "no key with waveforms [B, S]"
            raise SbkitError("script-signal", f"a batch of the script's test has {problem}", key="signal",
                             hint="say which: sbkit_export: {signal: KEY} in the YAML" if found else
                                  "only models of waveforms, such as batch.sig, can be exported")
        return found[0]


class _Numbered(Dataset[tuple[int, Row]]):
    """A dataset whose rows have their index beside them."""

    def __init__(self, dataset: DynamicItemDataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Row]:
        return index, self.dataset[index]


def _collate(collate: Callable[[Sequence[Row]], Any], rows: Sequence[tuple[int, Row]]) -> tuple[list[int], Any]:
    indices, examples = zip(*rows, strict=True)
    return list(indices), collate(examples)


def values_of(batch: Batch) -> dict[str, Any]:
    """Return the values of a batch by key: a ``PaddedBatch``, or any object with attributes."""
    names = getattr(batch, "_PaddedBatch__keys", None) or [name for name in vars(batch) if not name.startswith("_")]
    return {name: getattr(batch, name) for name in names}


def _is_signal(value: object) -> bool:
    if not isinstance(value, PaddedData) or not isinstance(value.data, Tensor):
        return False
    return value.data.is_floating_point() and value.data.ndim == 2 and value.data.shape[1] >= _SHORTEST_SIGNAL


def with_signals(batch: Batch, key: str, signals: Tensor, relative_lengths: Tensor, dummies: bool = False) -> Batch:
    """Return a batch of other waveforms [B, S], with lengths [B] relative to S, made from a batch of one row.

    Its other tensors, such as the tokens that a decoder is given, are that row's for each waveform.

    dummies : whether they are ones of the same shapes instead, so that a graph holds nothing of the row
    """
    count = signals.shape[0]  # a symbol while a graph is traced
    other = copy.copy(batch)
    for name, value in values_of(batch).items():
        if name == key:
            value = PaddedData(signals, relative_lengths)
        elif isinstance(value, PaddedData):
            value = PaddedData(_repeated(value.data, count, dummies), _repeated(value.lengths, count, dummies))
        elif isinstance(value, Tensor):
            value = _repeated(value, count, dummies)
        elif isinstance(value, list) and isinstance(count, int):
            value = value * count
        setattr(other, name, value)
    return other


def _repeated(tensor: object, count: int, dummies: bool) -> object:
    """Expand a tensor with one row to ``count`` rows; anything else stays as it is."""
    if not isinstance(tensor, Tensor) or tensor.ndim == 0 or tensor.shape[0] != 1:
        return tensor
    shape = (count, *tensor.shape[1:])
    return torch.ones(shape, dtype=tensor.dtype) if dummies else tensor.expand(shape)
