"""What a recipe says of where its run starts is looked at by the check, before any corpus is prepared."""

from __future__ import annotations

import json

import pytest
import torch
from run_folders import TINY, corpus, run_with_model
from safetensors.torch import save_file
from starts import RECIPE

from sbkit.recipe import devices
from sbkit.recipe.check import check

# Each takes a fraction of a second, and there are many.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_trials")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    return run_with_model(folder / "run", corpus(folder / "data", train=6, dev=2, test=2), rates=(40.0,))


def errors(folder, **keys):
    """Of a run that has prepared nothing: its vocabulary has another size."""
    given = {**TINY, "output_folder": str(folder / "new"), **keys}
    return check(RECIPE, given, starting=True).errors


def test_a_start_that_fits_passes_with_another_vocabulary(run, tmp_path):
    assert not errors(tmp_path, init_from=str(run), init_leave=["Transformer.decoder"])
    assert not (tmp_path / "new").exists()


def test_nothing_is_moved_for_a_run_on_a_cpu(tmp_path, monkeypatch):
    moved = []
    monkeypatch.setattr(devices, "check_moved", lambda *_: moved.append(1) or "")
    given = {**TINY, "output_folder": str(tmp_path / "new")}
    for starting, times in ((False, 1), (True, 0)):
        moved.clear()
        assert not check(RECIPE, given, starting=starting).errors
        assert len(moved) == times


def test_the_report_says_what_will_be_taken(run, tmp_path):
    given = {**TINY, "output_folder": str(tmp_path / "new"), "init_from": str(run), "init_average": 5,
             "init_leave": ["Transformer.decoder"]}
    report = check(RECIPE, given)
    rows = {name: rest for name, *rest in report.sections["start"].rows}
    assert rows["CNN"][1:] == ["taken", ""] and rows["Transformer.decoder"][1:] == ["reinitialised", "init_leave"]
    assert rows["ctc_lin"][1:] == ["taken", "rows of tokens that both have"]
    told = f"the run {run} (the mean of 1 checkpoint instead of 5: there are no more)"
    assert f"Start: from {told}" in report.text()
    values = json.loads(report.json())["sections"]["start"]["values"]
    assert values["from"] == told and {part["part"] for part in values["parts"]} == set(rows)
    assert "start" not in check(RECIPE, {**given, "init_from": None}).sections


def test_a_source_that_is_not_there(tmp_path):
    (error,) = errors(tmp_path, init_from=str(tmp_path / "nowhere"))
    assert (error.code, error.key) == ("start", "init_from") and error.message.endswith("nowhere doesn't exist")


@pytest.mark.parametrize("key, value, words", [
    ("init_leave", ["ctc_line"], "nothing is named 'ctc_line'"),
    ("init_checkpoint", "epoch9", "there is no checkpoint 'epoch9'"),
    ("d_model", 24, "tensors of the run"),
])
def test_what_does_not_fit_the_source(run, tmp_path, key, value, words):
    (error,) = errors(tmp_path, init_from=str(run), **{key: value})
    assert words in error.message and error.key == (key if key == "init_leave" else "init_from")


def test_rows_of_tokens_are_of_the_models_width(run, tmp_path):
    state = {name: value.contiguous() for name, value in
             torch.load(next(run.glob("save/*epoch1*/model.ckpt")), weights_only=True).items()}
    state["3.w.weight"] = torch.ones(28, 9)
    save_file(state, tmp_path / "model.safetensors")
    (error,) = errors(tmp_path, init_from=str(tmp_path / "model.safetensors"))
    assert "ctc_lin.w.weight: 28x9 there, 28x16 here" in error.message


def test_a_file_that_could_run_code(tmp_path):
    torch.save({"a": RECIPE}, tmp_path / "model.ckpt")
    (error,) = errors(tmp_path, init_from=str(tmp_path / "model.ckpt"))
    assert "could run code" in error.message


def test_a_run_that_has_a_checkpoint_needs_no_source(tmp_path):
    (tmp_path / "new" / "save" / "CKPT+epoch1").mkdir(parents=True)
    assert not errors(tmp_path, init_from=str(tmp_path / "nowhere"))
