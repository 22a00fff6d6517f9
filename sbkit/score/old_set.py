"""The initial model's score on the test of its own corpus, and whether a fine-tuned model is worse on it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from sbkit.score.metric import Metric
from sbkit.score.results import Results
from sbkit.score.run_files import OLD_SET
from sbkit.score.weights import ChosenWeights
from sbkit.system.console import atomic_write

OLD = "old"
"""The name of the old test among the parts of a run's test: "WER old"."""


@dataclass
class OldSet:
    """The score of the initial weights on the old test, stored in the run's folder.

    metric, lower_is_better : of the task
    before, interval : the metric of these weights, and its bounds; without an interval the metric twice
    share, old, new : for a mean of new and initial weights that restores the old score: the share of the new ones, and
        the metric on both tests; None if there is no such mean
    """

    metric: str
    lower_is_better: bool
    before: float
    interval: tuple[float, float]
    share: float | None = None
    old: float | None = None
    new: float | None = None

    @classmethod
    def of(cls, metric: Metric, results: Results) -> OldSet:
        name = metric.name
        value = results.stats[name]
        return cls(name, metric.lower_is_better, value,
                   results.facts().get(f"{name}_interval") or (value, value))

    @classmethod
    def read(cls, folder: Path) -> OldSet | None:
        """Read it from a run's folder; None if the run has none."""
        try:
            return cls(**json.loads((folder / OLD_SET).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        with atomic_write(folder / OLD_SET) as file:
            json.dump(dataclasses.asdict(self), file, indent=1)

    def is_worse(self, value: float) -> bool:
        """Whether a value is worse than before, beyond the interval."""
        return not (value <= self.interval[1] if self.lower_is_better else value >= self.interval[0])  # also NaN

    def describe(self, value: float) -> str:
        low, high = self.interval
        place = "within" if low <= value <= high else "beyond" if self.is_worse(value) else "better than"
        return (f"{self.metric} {value:.2f} on the old test, {place} the interval that it had before this run: "
                f"{self.before:.2f} ({low:.2f} to {high:.2f})")

    def offer(self, run: Path, weights: ChosenWeights) -> str:
        """Describe how to export the mean that restores the old score; empty if there is none.

        weights : the new ones
        """
        if self.share is None:
            return ""
        options = weights.with_share(self.share).options()
        return (f"sbkit export {run} --to BUNDLE{options} exports the mean of the new and the initial weights, with "
                f"{self.metric} {self.old:.2f} on the old test and {self.new:.2f} on the new one")
