"""sbkit tune finds what fits by trying, in few attempts, and remembers it; measuring takes real steps."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit import cli, tune
from sbkit.errors import SbkitError
from sbkit.recipe import arguments
from sbkit.train import device as devices

SMALL = Path(__file__).parent / "recipe" / "small.yaml"


@settings(max_examples=200, deadline=None)
@given(capacity=st.floats(0.5, 5000), edges=st.lists(st.floats(0.5, 30), min_size=1, max_size=6, unique=True),
       most=st.integers(30, 4000), bend=st.floats(0, 0.2))
def test_the_largest_that_fits_is_found_in_few_attempts(capacity, edges, most, bend):
    tried = []

    def needs(n, seconds):
        return n * seconds * (1 + bend * seconds)  # attention grows with the square

    def fits(n, seconds):
        tried.append((n, seconds))
        assert n >= 1 and n * seconds <= most + seconds
        return needs(n, seconds) <= capacity

    edges = sorted(edges)
    found = tune.search(edges, fits, most, show=False)
    for edge, n in zip(edges, found, strict=True):
        limit = max(1, int(most / edge))
        assert n == 0 or needs(n, edge) <= capacity
        beyond = n + max(1, int(tune.PRECISION * n) + 1)
        assert beyond > limit or needs(beyond, edge) > capacity
    assert len(tried) <= 25 * len(edges)


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """A trial on the CPU, as if memory ended at 30 seconds."""
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path))
    request = arguments.parse([str(SMALL), "--device", "cpu"])
    with tune._trial(request, torch.device("cpu")) as made:
        yield made


def test_a_trial_takes_real_steps_on_noise(trial):
    before = [p.clone() for p in trial.brain.modules.parameters()]
    assert trial.fits(2, 1.5)
    assert any(not torch.equal(a, b) for a, b in zip(before, trial.brain.modules.parameters(), strict=True))
    assert trial.edges == sorted(trial.edges) and trial.edges[-1] == 20.0 and len(trial.edges) <= tune.MOST_BUCKETS
    batch = trial.batch(3, 2.0)
    assert batch.padded_seconds == 6.0 and batch.tokens.min() >= 1 and batch.tokens.max() < 20
    assert not (Path.cwd() / "results" / "small").exists()


def test_out_of_memory_is_an_answer_and_leaves_nothing(trial, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trial.brain, "compute_objectives", full)
    assert trial.fits(2, 1.0) is False
    assert all(p.grad is None for p in trial.brain.modules.parameters()) and not trial.brain._steps.started


def test_the_result_is_kept_by_model_device_and_precision(trial, tmp_path):
    path = tune.cache_path(trial.brain, trial.device)
    assert path.parent == tmp_path / "tune" and path == tune.cache_path(trial.brain, trial.device)
    trial.brain.precision = "bf16"
    assert tune.cache_path(trial.brain, trial.device) != path
    path.parent.mkdir()
    path.write_text(json.dumps({"edges": [1.0], "fits": [7]}))
    assert tune._remembered(path, [1.0]) == [7] and tune._remembered(path, [2.0]) is None
    path.write_text("{")
    assert tune._remembered(path, [1.0]) is None


def test_what_is_recommended_leaves_a_margin(trial):
    told = tune._told(trial, [40 // max(1, int(edge)) for edge in trial.edges])
    assert "--max_batch_seconds" in told and "the recipe has 40" in told
    assert "not even one" in tune._told(trial, [0] * len(trial.edges))


def test_a_command_tunes_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(devices, "resolve", lambda name: type("Gpu", (), {"type": "cuda"})())
    monkeypatch.setattr(tune, "_trial", _fake_trial)
    monkeypatch.setattr(tune, "cache_path", lambda brain, device: tmp_path / "tune.json")
    assert cli.main(["tune", str(SMALL)]) == 0
    assert capsys.readouterr().out.splitlines()[3].split() == ["up", "to", "4.0", "s", "10", "40"]
    assert cli.main(["tune", str(SMALL)]) == 0
    assert "found before" in capsys.readouterr().err
    tried = _Fake.tried
    assert cli.main(["tune", str(SMALL), "--fresh"]) == 0
    assert _Fake.tried > tried


class _Fake:
    edges, most_seconds, tried = [2.0, 4.0], 100.0, 0
    device_name = "a card"
    brain = type("Brain", (), {"precision": "bf16"})
    batching = type("Batching", (), {"max_batch_seconds": 30})

    def fits(self, n, seconds):
        _Fake.tried += 1
        return n * seconds <= 40


def _fake_trial(request, device):
    import contextlib

    return contextlib.nullcontext(_Fake())


def test_there_is_nothing_to_tune_on_a_cpu(capsys):
    assert cli.main(["tune", str(SMALL), "--device", "cpu"]) == 2
    assert "nothing to tune on cpu" in capsys.readouterr().err


def test_measured_steps_stand_in_the_bill(capsys, monkeypatch):
    monkeypatch.setattr(tune, "STEPS", 1)
    assert cli.main(["check", str(SMALL), "--measure", "--device", "cpu"]) == 0
    assert "measured: a step of 40 s of audio takes" in capsys.readouterr().out


def test_a_batch_that_does_not_fit_can_not_be_measured(trial):
    with pytest.raises(SbkitError, match="sbkit tune finds the largest"):
        tune.time_steps(lambda batch: False, trial.batch(1, 1.0), torch.device("cpu"))
