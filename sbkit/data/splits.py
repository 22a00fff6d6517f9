"""The three splits of a corpus, and the source's splits that they are made of."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sbkit.errors import SbkitError

if TYPE_CHECKING:  # so that importing the names doesn't import every kind of source
    from sbkit.data.sources.base import Rows, Source

SPLITS = ("train", "dev", "test")
#: A source's names for each of them, the likeliest first.
ALIASES = {
    "train": ("train", "training"),
    "dev": ("dev", "validation", "valid", "val", "development", "eval"),
    "test": ("test", "testing"),
}

_SHARE = 0.02
_LEAST = 100


def check_splits(option: str, names: Collection[str]) -> None:
    """Refuse an option of a corpus that names anything but splits."""
    unknown = [name for name in names if name not in SPLITS]
    if unknown:
        raise SbkitError("bad-value", f"corpus: {option} names {unknown[0]!r}, which is not a split",
                         hint=f"splits are {', '.join(SPLITS)}", key=f"corpus.{option}", value=unknown[0])


def choose_splits(source: Source, wanted: Sequence[str], named: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The source's names for each of the wanted splits that it has.

    named : the names that the corpus itself gives for a split; others are looked up among ``ALIASES``
    """
    available = source.names()
    by_lower = {name.lower(): name for name in available}
    chosen = {}
    for split in wanted:
        if split in named:
            chosen[split] = named[split]
            for name in chosen[split]:
                if name not in available:
                    raise SbkitError("missing-split", f"{source.where} has no split {name!r} for {split}",
                                     hint=f"it has {', '.join(available) or 'none'}", key=f"corpus.splits.{split}",
                                     value=name)
        else:
            aliases = [*ALIASES[split], *(f"{name}_manifest" for name in ALIASES[split])]  # NeMo: train_manifest.json
            alias = next((name for name in aliases if name in by_lower), None)
            if alias is not None:
                chosen[split] = [by_lower[alias]]
    if not chosen:
        either = f"{', '.join(wanted[:-1])} or {wanted[-1]}" if len(wanted) > 1 else wanted[0]
        raise SbkitError("missing-split", f"{source.where} ({source.kind}) has no split {either} (it has "
                         f"{', '.join(available) or 'none'})",
                         hint="name them: --corpus.splits '{train: NAME, dev: NAME, test: NAME}'", file=source.where)
    return chosen


def assign_splits(keys: Iterable[str], least: int) -> dict[str, str]:
    """Choose the split of each key by its hash, so that few change when keys are added.

    Dev and test get 2 % each, but ``least`` if that is more and at most a tenth.
    """
    ordered = sorted(set(keys), key=lambda key: hashlib.sha256(key.encode()).digest())
    count = max(1, round(_SHARE * len(ordered)), min(least, len(ordered) // 10))
    return dict.fromkeys(ordered, "train") | dict.fromkeys(ordered[:count], "dev") \
        | dict.fromkeys(ordered[-count:], "test")


def hold_out(rows: Rows) -> dict[str, Rows]:
    """Divide a list's rows into train, dev and test: rows with the same sentence stay together, unless it has few."""
    keys = ["".join(filter(str.isalnum, text)).casefold() or name
            for text, name in zip(rows.texts, rows.ids, strict=True)]
    if len(set(keys)) < _LEAST:  # such as commands, which all splits need
        keys = list(rows.ids)
    split = assign_splits(keys, _LEAST)
    if len(set(split.values())) < len(SPLITS):
        raise SbkitError("too-few-rows", f"{rows.origin} has {len(rows)} rows, too few to split off dev and test",
                         hint="add rows, or give each split a list: --data_folder '{train: FILE, dev: FILE, ...}'",
                         file=rows.origin)
    divided = {name: rows.take(np.flatnonzero([split[key] == name for key in keys])) for name in SPLITS}
    # Rows that couldn't be parsed are counted once, in train.
    divided["dev"].malformed = []
    divided["test"].malformed = []
    return divided
