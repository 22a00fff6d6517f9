"""The check refuses an output folder whose checkpoints training couldn't load, in the words of training."""

import re
import shutil

import pytest
import run_folders
import torch
from refusals import refused

from sbkit.recipe.check import check

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_trials")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints, whose corpus had fewer characters than the recipe has tokens."""
    home = tmp_path_factory.mktemp("run")
    corpus = run_folders.corpus(home / "data", train=8, dev=2, test=2)
    return run_folders.run_with_model(home / "out", corpus, rates=(70.0,))


def given(run, **keys):
    return {**run_folders.TINY, "output_folder": str(run), "data_folder": str(run.parent / "data"), **keys}


def refusals(run, **keys):
    return [each for each in check(run_folders.RECIPE, given(run, **keys)).errors if each.code == "other-model"]


def test_refuses_the_folder_of_another_model_and_names_the_keys_that_changed(run):
    (found,) = refusals(run, d_model=32)
    assert found.key == "--output_folder" and found.suggestion.endswith("or another output_folder")
    assert f"the checkpoints in {run} are of another model; what has changed: " in found.message
    assert re.search(r"\bd_model\b[^;]*: 16 -> 32", found.message)


def test_refuses_the_folder_of_another_model_in_the_words_of_training_if_the_recipe_is_the_same(run):
    copy = shutil.copytree(run, run.parent / "relabelled")
    recipe = copy / "hyperparams.yaml"
    recipe.write_text(re.sub(r"\b(d_model|input_size): 16\b", r"\1: 32", recipe.read_text()))
    (found,) = refusals(copy, d_model=32)
    assert "16 saved, 32 here" in found.message
    made, _ = run_folders.prepared(run_folders.RECIPE, given(copy, d_model=32))
    with refused("other-model", wording=False) as loading:
        made.keys.checkpointer.recover_if_possible()
    assert loading.value.message == found.message


def test_passes_the_same_model_with_other_rates_and_another_number_of_characters(run):
    assert refusals(run, lr=0.01) == []
    tokenizers = run / "save"
    names = list(tokenizers.glob("*_char.model"))
    assert len(names) == 1
    (tokenizers / "999_char.model").write_bytes(names[0].read_bytes())  # so that the check doesn't know the number
    try:
        assert refusals(run) == []
    finally:
        (tokenizers / "999_char.model").unlink()


def test_passes_a_checkpoint_that_training_skips_as_damaged(run):
    copy = shutil.copytree(run, run.parent / "damaged")
    models = list(copy.glob("save/CKPT+*/model.ckpt"))
    for model in models:
        model.write_bytes(model.read_bytes()[:1000])
    assert refusals(copy, d_model=32) == []
    for model in models:
        torch.save({"none": torch.zeros(1)}, model)
    assert "only in the checkpoint (none)" in refusals(copy)[0].message
