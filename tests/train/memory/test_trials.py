"""Trials take real steps on noise; those with little memory end in an answer, whatever becomes of their process."""

import logging
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from sbkit.data.manifest import Manifest
from sbkit.recipe import arguments
from sbkit.system import memory
from sbkit.train.memory import step_timing, trials
from sbkit.train.memory.bounded_trial import BASE_BYTES, WORKER_BYTES, BoundedTrial

SMALL = Path(__file__).parents[2] / "recipe" / "small.yaml"
on_linux = pytest.mark.skipif(not memory.can_bound(), reason="only Linux keeps a process to a bound of memory")


@pytest.fixture(autouse=True)
def _shared_cache(cache, monkeypatch):
    monkeypatch.setenv("SBKIT_CACHE", str(cache))


def trial_of(recipe, *words):
    return trials.open_trial(arguments.parse([str(recipe), "--device", "cpu", *words]), torch.device("cpu"))


@pytest.fixture
def trial():
    """It leaves the warnings of unused layers to the run that comes after it."""
    logger = logging.getLogger("sbkit.train.distributed.unreached")
    with trial_of(SMALL) as made:
        assert not logger.isEnabledFor(logging.WARNING)
        yield made
    assert logger.isEnabledFor(logging.WARNING)


@pytest.mark.slow
def test_a_trial_takes_real_steps_on_noise(trial):
    before = [p.clone() for p in trial.brain.modules.parameters()]
    assert trial.fits(2, 1.5) and trial.brain.try_batch(trial.batch(2, 1.5))
    assert any(not torch.equal(a, b) for a, b in zip(before, trial.brain.modules.parameters(), strict=True))
    assert trial.edges == sorted(trial.edges) and trial.edges[-1] == 20.0 and len(trial.edges) <= trials.MAX_BUCKETS
    batch = trial.batch(3, 2.0)
    assert batch.padded_seconds == 6.0 and batch.tokens.min() >= 1 and batch.tokens.max() < 20
    assert not (Path.cwd() / "results" / "small").exists()


@pytest.mark.slow
@pytest.mark.parametrize("inside", [pytest.param(True, marks=pytest.mark.long), False])
def test_the_lengths_are_those_of_the_prepared_corpus_wherever_its_manifests_lie(inside, tmp_path):
    """Such as manifests that several runs share, outside of the output folder of each."""
    manifests = tmp_path / "run" / "manifests" if inside else tmp_path / "shared"
    Manifest(ids=["a", "b"], durations=[1.5, 3.0], wavs=["a.wav"] * 2, texts=["a", "b"]).write(manifests / "train.csv")
    words = ["--output_folder", str(tmp_path / "run"), *([] if inside else ["--corpus.folder", str(manifests)])]
    with trial_of(SMALL, *words) as made:
        assert made.edges[-1] == 3.0


@pytest.mark.slow
def test_a_recipe_without_an_output_folder_is_tried(tmp_path):
    path = tmp_path / "recipe.yaml"
    text = SMALL.read_text().replace("output_folder: !ref results/small/<seed>\n", "")
    path.write_text(text.replace("<output_folder>", str(tmp_path / "run")))
    with trial_of(path) as made:
        assert made.edges[-1] == 20.0


@pytest.mark.slow
def test_out_of_memory_is_an_answer_and_leaves_nothing(trial, monkeypatch):
    def full(*args, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trial.brain, "compute_objectives", full)
    assert trial.fits(2, 1.0) is False
    assert all(p.grad is None for p in trial.brain.modules.parameters())


@pytest.mark.slow
@on_linux
def test_a_process_with_little_memory_says_what_fits():
    request = arguments.parse([str(SMALL), "--device", "cpu"])
    size = BASE_BYTES + 2 * WORKER_BYTES + (1 << 30)
    with BoundedTrial(request, size) as bounded:
        assert bounded.fits(2, 2.0) is True
        (first,) = multiprocessing.active_children()
        assert bounded.fits(3000, 2.0) is False  # six thousand seconds of audio are 400 MB before anything is computed
        assert bounded.fits(2, 2.0) is True
        (second,) = multiprocessing.active_children()
        assert second is not first
        second.kill()  # as the kernel does
        assert bounded.fits(2, 2.0) is False
        with refused("failed-trial"):
            bounded.fits(1, -1)


def test_measuring_a_batch_that_does_not_fit_is_an_error():
    with refused("out-of-memory"):
        step_timing.time_steps(lambda batch: False, SimpleNamespace(padded_seconds=1.0), torch.device("cpu"))


@pytest.mark.slow
def test_measured_steps_are_in_the_cost_section(capsys, monkeypatch):
    from sbkit import cli

    monkeypatch.setattr(step_timing, "STEPS", 1)
    assert cli.main(["check", str(SMALL), "--measure", "--device", "cpu"]) == 0
    assert "the largest micro-batch that max_batch_seconds allows, 40 s of audio, takes" in capsys.readouterr().out
