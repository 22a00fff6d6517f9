"""The checkpoints in a folder, and their order of importance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechbrain.utils.checkpoints import METAFNAME, PARAMFILE_EXT, Checkpoint, ckpt_recency

from sbkit.train.checkpoint.files import CheckpointError, read_meta

Predicate = Callable[[Checkpoint], bool]
Importance = Callable[[Checkpoint], Any]


def readable_checkpoints(folders: Iterable[Path]) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Return the checkpoints in these folders, and for unreadable ones the reason."""
    found, unreadable = [], {}
    for path in folders:
        try:
            meta = read_meta(path)
            states = {file.stem: file for file in path.iterdir() if file.suffix == PARAMFILE_EXT}
            found.append(Checkpoint(path, meta, states))
        except ValueError as error:
            unreadable[path] = str(error)
        except FileNotFoundError:
            continue  # another process deleted it after it was listed
    return found, unreadable


def ranked(
    ckpts: Iterable[Checkpoint], importance_key: Importance | None = None, max_key: str | None = None,
    min_key: str | None = None, ckpt_predicate: Predicate | None = None,
) -> list[Checkpoint]:
    """Sort checkpoints by importance and then by time; with a key, keep only those that have it."""
    if sum(map(bool, (importance_key, max_key, min_key))) > 1:
        raise ValueError("Must specify only one of 'importance_key', 'max_key', and 'min_key'.")
    newest_first = sorted(filter(ckpt_predicate, ckpts), key=ckpt_recency, reverse=True)
    key = max_key or min_key
    if not key:
        return sorted(newest_first, key=importance_key or ckpt_recency, reverse=True)
    having = [ckpt for ckpt in newest_first if key in ckpt.meta]
    return sorted(having, key=lambda ckpt: _rank(ckpt.meta[key], 1 if max_key else -1), reverse=True)


def orders(
    min_keys: Iterable[str], max_keys: Iterable[str], importance_keys: Iterable[Importance]
) -> list[dict[str, Any]]:
    """Return arguments of ``ranked`` for each criterion."""
    return [
        *({"min_key": key} for key in min_keys), *({"max_key": key} for key in max_keys),
        *({"importance_key": key} for key in importance_keys),
    ]


def unknown_key(
    folder: Path, keys: Iterable[str], metas: Sequence[Mapping[str, Any]]
) -> CheckpointError | None:
    """Return the error for the first of ``keys`` that no meta file has; None if all are known."""
    unknown = next((key for key in keys if not any(key in meta for meta in metas)), None)
    if unknown is None:
        return None
    there = sorted({key for meta in metas for key in meta} - {"unixtime", "end-of-epoch"})
    return CheckpointError(
        f"no checkpoint in {folder} has {unknown!r} in its {METAFNAME}",
        hint=f"existing keys: {', '.join(there) or 'none'}",
    )


def _rank(metric: object, sign: int) -> float:
    """Return the sort key of a metric; NaN and values that are no number come last."""
    if not isinstance(metric, (int, float)) or math.isnan(metric):
        return -math.inf
    return sign * metric
