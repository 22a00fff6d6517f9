"""What a run knows of a mixture's parts: scores of each, and the hours of training on it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sbkit.data.corpus import Corpus
from sbkit.data.loader import TrainLoader
from sbkit.data.manifest import Manifest
from sbkit.data.mixture import Mixture
from sbkit.data.plan import Batching, Plan
from sbkit.score.metric import Metric
from sbkit.score.results import Results
from sbkit.tasks.mixture_parts import ALL, MixtureParts
from sbkit.tasks.task import Task
from sbkit.train.checkpoint import Checkpointer

PARTS = {"read": Corpus("."), "calls": Corpus(".")}


def rows(*of: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(id=f"{part}:{i}", wrong=10 * (i + 1)) for i, part in enumerate(of)]


def stats(some) -> dict[str, float]:
    return {"WER": sum(row.wrong for row in some) / len(some), "count": len(some)}


@pytest.mark.parametrize("best_by, rate, count", [("mean", 27.5, 2.5), ("read", 20.0, 3), ("calls", 35.0, 2)])
def test_the_best_checkpoint_goes_by_the_mean_of_parts_or_by_one(best_by, rate, count):
    parts = MixtureParts(Mixture(PARTS, best_by=best_by))
    found = parts.validation_stats(
        rows("read", "read", "read", "calls")[1:] + rows("read", "read", "calls")[2:] + rows("read"), stats)
    assert found["WER read"] == pytest.approx(20) and found["count read"] == 3 and found["count"] == count
    assert found["WER calls"] == pytest.approx(35) and found["WER"] == pytest.approx(rate)
    log = parts.for_log({"loss": 1.0, **found})
    assert log == {"loss": 1.0, f"WER {best_by}": found["WER"], f"count {best_by}": count,
                   **{name: value for name, value in found.items() if " " in name}}


def test_nothing_is_said_of_parts_where_there_is_one_or_another_corpus():
    for corpus, some in ((Corpus("."), rows("read", "calls")), (Mixture(PARTS), rows("read", "read")),
                         (Mixture(PARTS), rows("read", "another"))):
        assert MixtureParts(corpus).validation_stats(some, stats) == stats(some)
        assert MixtureParts(corpus).for_log(stats(some)) == stats(some)
    assert MixtureParts(Corpus(".")).close_epoch(1, None) == {}


def test_a_test_has_results_of_each_part():
    found = Results({"loss": 1.0, "WER": 25.0}, 4)
    parts = MixtureParts(Mixture(PARTS))
    parts.add_results(found, rows("read", "calls", "calls"), lambda some: Results(
        {"loss": 1.0, "WER": float(len(some))}, len(some)))
    assert found.stats == {"loss": 1.0, "WER": 25.0, "WER read": 1.0, "WER calls": 2.0}
    assert parts.for_log(found.stats, ALL) == {"loss": 1.0, "WER of all parts": 25.0, "WER read": 1.0, "WER calls": 2.0}
    assert {part: each.utterances for part, each in found.parts.items()} == {"read": 1, "calls": 2}


class Scored(Task):
    """Its rows have their errors."""

    metric = Metric("WER")

    def stats(self, rows):
        return stats(rows)


def test_a_task_gives_its_test_the_results_of_each_part_with_their_interval():
    task = Scored({"layer": torch.nn.Linear(1, 1)}, hparams={"corpus": Mixture(PARTS)}, run_opts={"device": "cpu"})
    found = task.tested_results(rows("read", "calls", "calls"), 1.0, {})
    assert {part: each.stats["WER"] for part, each in found.parts.items()} == {"read": 10.0, "calls": 25.0}
    assert found.stats["WER"] == 20.0 and all(each.estimate for each in (found, *found.parts.values()))


def train_epoch(parts: MixtureParts, shares: dict[str, float], epoch: int) -> dict[str, float]:
    """Close an epoch of a training set in which each part has ten rows of a second."""
    names = [name for name in shares for _ in range(10)]
    train = Manifest(ids=[f"{name}:{i}" for i, name in enumerate(names)], durations=np.ones(len(names)),
                     wavs=["a.wav"] * len(names), texts=[""] * len(names), meta={"corpus": names}, shares=shares)
    parts.open_run(TrainLoader(train, None, Plan.of(train, Batching(5), None, 1), workers=0))
    return parts.close_epoch(epoch, None)


def test_hours_are_counted_over_epochs_and_a_part_that_is_added_begins_at_nothing(tmp_path):
    begun = Checkpointer(tmp_path, {})
    parts = MixtureParts(Mixture(PARTS), begun)
    first = train_epoch(parts, {"read": 0.25, "calls": 0.75}, 1)
    assert first == pytest.approx({"hours read": 5 / 3600, "epochs read": 0.5, "hours calls": 15 / 3600,
                                   "epochs calls": 1.5})
    assert train_epoch(parts, {"read": 0.25, "calls": 0.75}, 1) == first, "an epoch that is closed again counts once"
    begun.save_checkpoint()
    begun.wait()
    resumed = Checkpointer(tmp_path, {})
    parts = MixtureParts(Mixture({**PARTS, "more": Corpus(".")}), resumed)
    resumed.recover_if_possible()
    found = train_epoch(parts, {"read": 0.25, "calls": 0.25, "more": 0.5}, 2)
    assert found["epochs more"] == pytest.approx(1.5) and found["epochs calls"] == pytest.approx(1.5 + 0.75, abs=0.051)
