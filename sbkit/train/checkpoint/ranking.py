"""Which of several checkpoints is the most important: pure functions of their meta data, without any disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from speechbrain.utils.checkpoints import METAFNAME, Checkpoint, ckpt_recency

from sbkit.train.checkpoint.files import CheckpointError

Importance = Callable[[Checkpoint], Any]

_ERROR_RATES = ("WER", "CER")  # in percent
#: Meta data of SpeechBrain's, which are no metrics.
_NOT_METRICS = {"unixtime", "end-of-epoch"}


def ranked(checkpoints: Iterable[Checkpoint], importance_key: Importance | None = None, max_key: str | None = None,
           min_key: str | None = None) -> list[Checkpoint]:
    """Sort checkpoints, the most important first and of equal ones the newest.

    importance_key, max_key, min_key : at most one of them: a function of a checkpoint, or a metric of which the highest
        or the lowest is the best. With a metric, only checkpoints that have it are returned; without any, the newest is
        the most important
    """
    if sum(map(bool, (importance_key, max_key, min_key))) > 1:
        raise ValueError("Must specify only one of 'importance_key', 'max_key', and 'min_key'.")
    newest_first = sorted(checkpoints, key=ckpt_recency, reverse=True)
    metric = max_key or min_key
    if not metric:
        return sorted(newest_first, key=importance_key or ckpt_recency, reverse=True)
    with_metric = [checkpoint for checkpoint in newest_first if metric in checkpoint.meta]
    return sorted(with_metric, key=lambda checkpoint: _goodness(checkpoint.meta, metric, bool(max_key)), reverse=True)


def _goodness(meta: Mapping[str, Any], metric: str, higher_is_better: bool) -> tuple[float, float]:
    """Return how good a checkpoint is by a metric, for sorting; NaN and values that are no number are the worst.

    Error rates of 100 % and more count as equal: empty transcripts have 100 %, and those of a model that has learnt
    some letters may have more. Of such checkpoints the one with the lowest loss is the best.
    """
    value = meta[metric]
    loss = meta.get("loss")
    if not isinstance(value, (int, float)) or math.isnan(value):
        return -math.inf, 0.0
    if higher_is_better:
        return value, 0.0
    if metric in _ERROR_RATES and value >= 100 and isinstance(loss, (int, float)):
        return -100.0, -math.inf if math.isnan(loss) else -loss
    return -value, 0.0


def obsolete(rankings: Iterable[Sequence[Checkpoint]], number_to_keep: int) -> list[Checkpoint]:
    """Return the checkpoints that are in none of several rankings among the first ``number_to_keep``."""
    rankings = list(rankings)
    paths_to_keep = {checkpoint.path for ranking in rankings for checkpoint in ranking[:number_to_keep]}
    obsolete_by_path = {checkpoint.path: checkpoint for ranking in rankings for checkpoint in ranking
                        if checkpoint.path not in paths_to_keep}
    return list(obsolete_by_path.values())


def unknown_key(keys: Iterable[str | None], metas: Sequence[Mapping[str, Any]], folder: object
                ) -> CheckpointError | None:
    """Return the error for the first of ``keys`` that no checkpoint of a folder has; None if there is no such key.

    metas : the meta data of the checkpoints; of none at all, no key is unknown
    """
    unknown = next((key for key in keys if key and not any(key in meta for meta in metas)), None)
    if unknown is None or not metas:
        return None
    metrics = sorted({key for meta in metas for key in meta} - _NOT_METRICS)
    return CheckpointError("unknown-metric", f"no checkpoint in {folder} has {unknown!r} in its {METAFNAME}",
                           hint=f"existing keys: {', '.join(metrics) or 'none'}", value=unknown)
