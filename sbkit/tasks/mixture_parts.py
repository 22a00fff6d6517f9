"""The parts of a mixture in a run: the hours of training on each, and each one's scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks

from sbkit.data.loader import TrainLoader
from sbkit.data.mixture import MEAN, Mixture, hours_of
from sbkit.score.results import Results
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.monitor.metrics import MetricsLog

ALL = "of all parts"
Stats = Mapping[str, float]


@register_checkpoint_hooks
class MixtureParts:
    """Counts the hours of training on each part of a mixture, and scores the parts one by one.

    Checkpoints hold the hours of each epoch, also of parts that a resumed run no longer has. For a corpus that is no
    mixture it does nothing.
    """

    def __init__(self, corpus: object, checkpointer: Checkpointer | None = None):
        self._mixture = corpus if isinstance(corpus, Mixture) else None
        self._loader: TrainLoader | None = None
        self._hours: dict[str, dict[str, float]] = {}  # by epoch, as a text for JSON
        if self._mixture is not None and checkpointer is not None:
            checkpointer.add_recoverable("parts", self, optional_load=True)

    def open_run(self, train_set: TrainLoader | None) -> None:
        """Count the hours of this training data from now on; None: count nothing."""
        self._loader = train_set

    def close_epoch(self, epoch: int | None, log: MetricsLog | None) -> dict[str, float]:
        """Count and log an epoch; returns the hours of training on each part so far, and its epochs."""
        if self._mixture is None or self._loader is None or epoch is None:
            return {}
        train = self._loader.reader.manifest
        trained_on: dict[str, float] = {}
        self._hours[str(epoch)] = hours_of(train, self._loader.epoch_plan(epoch).members)
        for name, size in hours_of(train).items():
            trained = sum(hours.get(name, 0.0) for hours in self._hours.values())
            trained_on |= {f"hours {name}": trained, f"epochs {name}": trained / size}
        if log is not None:
            log.write("epoch", epoch=epoch, **trained_on)
        return trained_on

    def rows(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        """Group rows by part; returns nothing if all are of one part, or some of another corpus."""
        if self._mixture is None:
            return {}
        by_part: dict[str, list[Any]] = {}
        for row in rows:
            by_part.setdefault(self._mixture.part_of(row.id), []).append(row)
        known = by_part.keys() <= self._mixture.parts.keys()
        return by_part if known and len(by_part) > 1 else {}

    def validation_stats(self, rows: Sequence[Any], stats: Callable[[Sequence[Any]], Stats]) -> dict[str, float]:
        """Compute ``stats`` of each part's rows, named with the part; those without a part are of ``best_by``."""
        overall = dict(stats(rows))
        of_parts = {part: stats(part_rows) for part, part_rows in self.rows(rows).items()}
        best_by = MEAN if self._mixture is None else self._mixture.best_by
        for name in overall:
            values = [part_stats[name] for part, part_stats in of_parts.items()
                      if name in part_stats and best_by in (MEAN, part)]
            if values:
                overall[name] = sum(values) / len(values)
        for part, part_stats in of_parts.items():
            overall |= _named(part_stats, part)
        return overall

    def for_log(self, stats: Stats, of: str = "") -> dict[str, float]:
        """Add ``of`` (by default ``best_by``) to the names of statistics that have no part in them."""
        if self._mixture is None:
            return dict(stats)
        of, parts = of or self._mixture.best_by, self._mixture.parts
        return {f"{name} {of}" if any(f"{name} {part}" in stats for part in parts) else name: value
                for name, value in stats.items()}

    def add_results(self, of_all: Results, rows: Sequence[Any], results: Callable[[Sequence[Any]], Results]) -> None:
        """Add to a test's results the ``results`` of each part's rows."""
        of_all.parts = {part: results(part_rows) for part, part_rows in self.rows(rows).items()}
        for part, part_results in of_all.parts.items():
            of_all.stats |= _named(part_results.stats, part)

    @mark_as_saver
    def _save(self, path: str | PathLike[str]) -> None:
        Path(path).write_text(json.dumps(self._hours), encoding="utf-8")

    @mark_as_loader
    def _load(self, path: str | PathLike[str], end_of_epoch: bool) -> None:
        self._hours = json.loads(Path(path).read_text(encoding="utf-8"))


def _named(stats: Stats, part: str) -> dict[str, float]:
    """Add a part to the names of its statistics; leaves out the loss, which is of all rows."""
    return {f"{name} {part}": value for name, value in stats.items() if name != "loss"}
