"""``sbkit prepare`` never replaces what a run was trained on, and no evaluation reports another corpus as its own."""

import json

import pytest
from processes import ROOT
from run_folders import TINY, corpus, run_with_model

from sbkit.cli import main

RECIPE = ROOT / "hparams" / "ctc.yaml"
KEYS = [word for key, value in TINY.items() for word in (f"--{key}", str(value)) if key != "num_decoder_layers"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    home = tmp_path_factory.mktemp("data")
    return [corpus(home / name, train=12, dev=3, test=tests) for name, tests in (("own", 5), ("other", 4))]


def prepare(source, run, *more):
    return main(["prepare", str(RECIPE), *KEYS, "--data_folder", str(source), "--output_folder", str(run), *more])


def files(run):
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*")
            if path.is_file() and not path.name.startswith(".")}


@pytest.mark.parametrize("changed", [[], ["--corpus.max_duration", "0.9"]], ids=["another corpus", "another option"])
def test_the_manifests_of_a_trained_run_are_not_replaced(data, tmp_path, capsys, changed):
    own, other = data
    run = run_with_model(tmp_path / "run", own)
    before = files(run)
    assert prepare(own if changed else other, run, *changed) == 2
    assert "has the manifests that the run in" in capsys.readouterr().err
    assert files(run) == before
    assert prepare(own, run) == 0 and files(run) == before
    assert prepare(other, tmp_path / "new") == 0


def test_keys_that_clash_are_refused_before_anything_is_written(data, tmp_path, capsys):
    run = tmp_path / "run"
    assert prepare(data[0], run, "--init_from", str(tmp_path / "gone"), "--replay", "0.2") == 2
    assert f"{tmp_path / 'gone'} doesn't exist" in capsys.readouterr().err
    assert not run.exists()


def test_the_normalisation_of_a_trained_run_is_not_replaced(data, tmp_path, capsys):
    run = run_with_model(tmp_path / "run", data[0])
    before = files(run)
    assert prepare(data[0], run, "--normalize.norm_type", "sentence") == 2
    assert "normalize.norm_type: it is sentence, but the run in" in capsys.readouterr().err and files(run) == before


def test_a_preparation_that_fails_leaves_a_run_that_has_not_trained_as_it_was(data, tmp_path):
    own, other = data
    run = tmp_path / "run"
    assert prepare(own, run) == 0
    (run / "hyperparams.yaml").write_text(f"output_folder: {run}\n")
    before = files(run)
    assert prepare(other, run, "--output_neurons", "12") == 2  # fewer than the corpus has characters
    after = files(run)
    assert {name: data for name, data in after.items() if name.startswith("manifests/")} == {
        name: data for name, data in before.items() if name.startswith("manifests/")}


@pytest.mark.parametrize("record", ["a start's", "a test's", "none"])
def test_another_corpus_is_not_reported_as_the_runs_own(data, tmp_path, capsys, record):
    own, other = data
    run = run_with_model(tmp_path / "run", own)
    splits = json.loads((run / "manifests" / "prepare_report.json").read_text())["splits"]
    sums = {split: entry["sha256"] for split, entry in splits.items()}
    if record == "a start's":
        start = {"time": 1.7e9, "kind": "run", "command": "sbkit train", "environment": {}}
        lines = [{**start, "manifests": {"test": "0"}}, {**start, "manifests": sums}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif record == "a test's":
        (run / "tested.json").write_text(json.dumps({"of": {"manifest": sums["test"]}}))
    evaluate = ["evaluate", str(run), "--device", "cpu", "--workers", "0"]
    assert main(evaluate) == 0
    capsys.readouterr()
    manifests = {path: path.read_bytes() for path in (run / "manifests").iterdir() if path.is_file()}
    assert prepare(other, tmp_path / "new") == 0
    for path in (tmp_path / "new" / "manifests").iterdir():  # as an earlier version of sbkit prepare left them
        if path.is_file():
            (run / "manifests" / path.name).write_bytes(path.read_bytes())
    assert main(evaluate) == 2
    assert "test.csv is not the manifest that the run in" in capsys.readouterr().err
    assert main([*evaluate, "--data_folder", str(other)]) == 0
    if record != "none":  # nothing knows then that these manifests aren't the run's
        assert prepare(own, run) == 0
        assert main(evaluate) == 0
        csv = run / "manifests" / "test.csv"
        assert csv.read_bytes() == manifests[csv]
