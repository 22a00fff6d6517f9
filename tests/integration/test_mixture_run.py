"""A run on a mixture, from its recipe to the report: parts are counted and scored, and one is added on the way."""

import json
from pathlib import Path

import pytest
from processes import sbkit
from run_folders import TINY
from trained_runs import ROOT, metrics, options, tones

PART = "!new:sbkit.data.corpus.Corpus {{source: {}, language: en{}}}"
OPTIONS = options(**TINY, precision="fp32", log_interval=0)


def recipe(folder: Path, **parts: str) -> Path:
    """The flagship on these parts, each of which has as much of a step."""
    lines = [f"recipe: !include:{ROOT}/hparams/ctc.yaml", "    language: en", "    max_batch_seconds: 20",
             "    corpus: !new:sbkit.data.mixture.Mixture", "        folder: !ref <output_folder>/manifests",
             f"        weights: {{{', '.join(f'{name}: 1' for name in parts)}}}", "        best_by: small",
             "        parts:", *(f"            {name}: {part}" for name, part in parts.items())]
    path = folder / f"{'-'.join(parts)}.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def train(folder: Path, path: Path, epochs: int) -> str:
    """Train on; returns what the run printed. test_replay_run.py compares a mixture in a Python with other hashes."""
    words = "train", path, "--output_folder", folder / "run", "--number_of_epochs", epochs, "--noprogressbar", *OPTIONS
    done = sbkit(*words, cwd=folder)
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_part_is_added_to_a_run_that_is_resumed(tmp_path):
    tones(tmp_path / "large", 60, 6)
    tones(tmp_path / "small", 12, 6, shortest=0.6)
    tones(tmp_path / "new", 24, 6)
    parts = {name: PART.format(tmp_path / name, "") for name in ("large", "small")}
    said = train(tmp_path, recipe(tmp_path, **parts), 1)
    assert "test large: WER" in said and "test small: WER" in said and "times seen in a pass" in said
    parts["new"] = PART.format(tmp_path / "new", ", only: [train]")
    said = train(tmp_path, recipe(tmp_path, **parts), 2)
    assert "resumes with changed values" in said and "corpus.weights.new: nothing -> 1" in said
    assert "trained on other text, but kept" in said and "Continuing with epoch 2 of 2" in said
    lines = metrics(tmp_path / "run", "epoch")
    first, second = ([line for line in lines if line["epoch"] == epoch and name in line]
                     for epoch, name in ((1, "hours large"), (2, "hours new")))
    assert first[0]["hours small"] == pytest.approx(first[0]["hours large"], rel=0.1)
    assert first[0]["epochs small"] > 2 > 1 > first[0]["epochs large"]
    assert second[0]["hours large"] > first[0]["hours large"] and second[0]["epochs new"] < 2
    valid = next(line for line in reversed(lines) if "valid_WER" in line)
    assert valid["valid_WER"] == valid["valid_WER small"] and "valid_WER large" in valid
    assert "valid_WER new" not in valid
    done = json.loads((tmp_path / "run" / "tested.json").read_text())["said"]
    assert done.startswith("large: WER") and "; small: WER" in done, "the same command says it again"
    assert "part of the mixture" in (tmp_path / "run" / "report.html").read_text()
    found = sbkit("evaluate", tmp_path / "run", "--device", "cpu", "--workers", 0, cwd=tmp_path)
    assert "  small: WER" in found.stdout
    facts = json.loads((tmp_path / "run" / "evaluations" / "test-best" / "result.json").read_text())
    assert set(facts["parts"]) == {"large", "small"} and facts["parts"]["small"]["WER_interval"]
