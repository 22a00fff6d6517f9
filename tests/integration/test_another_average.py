"""An average of checkpoints that is only a class in the table of averages is known wherever weights are chosen."""

import json
import logging

import pytest
import run_folders
import torch
from starts import started

from sbkit.cli import main
from sbkit.errors import SbkitError
from sbkit.recipe.check import check
from sbkit.runs import restore
from sbkit.score import utterances
from sbkit.score.old_set import OldSet
from sbkit.score.report import write_report
from sbkit.score.run_files import TEST_UTTERANCES
from sbkit.score.weights import AVERAGES, Average, ChosenWeights, average_of

pytestmark = pytest.mark.slow


class Largest(Average):
    """The largest value of each parameter."""

    name = "largest"

    def combine(self, tensors, checkpoints):
        assert len(tensors) == len(checkpoints) and all("WER" in checkpoint.meta for checkpoint in checkpoints)
        return torch.stack(list(tensors)).amax(0)


@pytest.fixture(autouse=True)
def in_the_table(monkeypatch):
    monkeypatch.setitem(AVERAGES, Largest.name, Largest)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return run_folders.corpus(tmp_path_factory.mktemp("average") / "data", train=12, dev=3, test=5)


@pytest.fixture(scope="module")
def run(data):
    folder = run_folders.run_with_model(data.parent / "run", data)
    utterances.write(folder / TEST_UTTERANCES, run_folders.scored())  # the test of the best checkpoint
    return folder


@pytest.fixture(scope="module")
def largest(run):
    """The larger of each parameter in the two best checkpoints."""
    first, second = (torch.load(run / "save" / f"CKPT+epoch{epoch}" / "model.ckpt", weights_only=True)
                     for epoch in (2, 3))
    return {name: torch.maximum(value, second[name]) for name, value in first.items() if value.is_floating_point()}


def values():
    """How messages say which values ask for an average, of which this test's is the last."""
    named = " or ".join(f"{name}-of-N" for name in AVERAGES)
    assert named.endswith("or largest-of-N")
    return f"a whole number, 1 or more, or {named}"


def equal(brain, expected):
    actual = brain.hparams.model.state_dict()
    return all(torch.equal(actual[name], value) for name, value in expected.items())


def test_a_run_is_loaded_with_it(run, largest):
    _, brain = restore.load_run(run, "cpu", weights=ChosenWeights(average=average_of("largest-of-2")))
    assert equal(brain, largest)


def test_a_run_tests_it(run, largest, caplog):
    recipe = restore.read_run(run)
    recipe.hparams["average_checkpoints"] = "largest-of-2"
    brain = restore.build(recipe, "cpu")
    with caplog.at_level(logging.INFO, "sbkit.tasks"):
        brain.on_evaluate_start(**brain.metric.order)
    assert equal(brain, largest) and "Testing the largest of 2 checkpoints" in caplog.text


def test_a_run_starts_from_it(run, data, largest, tmp_path, caplog):
    brain, _, table = started(tmp_path / "new", data, caplog, init_from=str(run), init_average="largest-of-2")
    assert equal(brain, largest) and f"the run {run} (the largest of 2 checkpoints)" in table


def test_the_check_knows_how_many_it_needs(data, tmp_path):
    keys = {**run_folders.TINY, "output_folder": str(tmp_path), "data_folder": str(data)}
    problems = [error.message for error in check(
        run_folders.RECIPE, {**keys, "average_checkpoints": "largest-of-3", "keep_checkpoints": 2}).errors]
    assert problems == ["it is largest-of-3, but keep_checkpoints is 2: fewer are kept"]
    problems = [error.message for error in check(
        run_folders.RECIPE, {**keys, "average_checkpoints": "smallest-of-3"}).errors]
    assert problems == [f"it is the text 'smallest-of-3', and must be {values()}"]


def test_it_is_evaluated_exported_and_named_in_the_bundle_and_its_card(run, tmp_path):
    words = ["--average", "largest-of-2"]
    options = ["--formats", "speechbrain", "--clips", "2", "--to"]
    assert main(["export", str(run), *words, *options, str(tmp_path / "before")]) == 0
    card = (tmp_path / "before" / "README.md").read_text()
    assert ("The run tested the checkpoint `best`, and this bundle has the largest of 2 checkpoints (`best`), whose "
            "figures are not recorded: `sbkit evaluate RUN --average largest-of-2` measures them") in card

    assert main(["evaluate", str(run), *words, "--device", "cpu", "--workers", "0"]) == 0
    result = json.loads((run / "evaluations" / "test-best-largest-of-2" / "result.json").read_text())
    assert result["checkpoints"] == ["CKPT+epoch2", "CKPT+epoch3"]

    assert main(["export", str(run), *words, *options, str(tmp_path / "after")]) == 0
    card = (tmp_path / "after" / "README.md").read_text()
    assert "the largest of 2 checkpoints (`best`), which `sbkit evaluate` tested: these are its figures." in card
    trained = json.loads((tmp_path / "after" / "config.json").read_text())["trained"]
    assert trained["largest_of"] == 2 and "valid" not in trained, "the validation was of other weights"


def test_the_report_offers_it(tmp_path):
    run = run_folders.finished_run(tmp_path / "run", run_folders.scored())
    (run / "hyperparams.yaml").write_text("replay: 0.25\naverage_checkpoints: largest-of-2\n")
    OldSet("WER", True, 5.0, (4.0, 6.0), share=0.5, old=5.5, new=9.0).write(run)
    run_folders.log(run, {"time": 1.8e9, "kind": "test", "test_WER old": 90.0})
    write_report(run)
    assert f"sbkit export {run} --to BUNDLE --mean 0.5 --average largest-of-2 exports" in \
        (run / "report.html").read_text()


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_the_help_of_a_command_lists_it(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "largest-of-N" in " ".join(capsys.readouterr().out.split())


def test_what_is_in_no_table_is_refused(run, capsys):
    assert main(["evaluate", str(run), "--average", "smallest-of-2"]) == 2
    assert f"'smallest-of-2' does not name an average of checkpoints; write {values()}" in capsys.readouterr().err
    with pytest.raises(SbkitError, match="can't average 0 checkpoints"):
        average_of("largest-of-0")
