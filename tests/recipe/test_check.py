"""sbkit check names all mistakes of a recipe at once, also those that it finds in different ways."""

import pytest
from written import SMALL

from sbkit.recipe.check import check

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_trials")]


def keys_of_errors(path, overrides, **options):
    return sorted(error.key for error in check(path, overrides, **options).errors)


@pytest.mark.parametrize("starting", [False, True])
def test_names_wrong_paths_of_a_recipe_whose_model_cannot_be_built(tmp_path, starting):
    gone = str(tmp_path / "gone")
    overrides = {"Transformer": {"nhead": 3}, "init_from": gone, "data_folder": gone, "output_folder": "/proc/x"}
    assert keys_of_errors(SMALL, overrides, starting=starting) == [
        "--data_folder", "--output_folder", "Transformer.nhead", "init_from"]


def test_names_a_missing_source_of_weights_beside_a_part_that_cannot_be_built(tmp_path):
    overrides = {"init_from": str(tmp_path / "gone"), "compute_features": {"n_fft": 0}}
    assert keys_of_errors(SMALL, overrides) == ["compute_features.n_fft", "init_from"]


def test_names_a_missing_source_of_weights_once(tmp_path):
    overrides = {"init_from": str(tmp_path / "gone"), "replay": 0.2}
    assert keys_of_errors(SMALL, overrides) == ["init_from"]
    assert keys_of_errors(SMALL, {**overrides, "Transformer": {"nhead": 3}}) == ["Transformer.nhead", "init_from"]


def test_says_that_a_source_that_may_be_on_the_hub_is_not_looked_up_for_a_model_that_cannot_be_built():
    report = check(SMALL, {"init_from": "results_of_nobody/missing", "Transformer": {"nhead": 3}})
    assert [error.key for error in report.errors] == ["Transformer.nhead"]
    assert any(note.startswith("init_from: results_of_nobody/missing") for note in report.notes)


def test_needs_no_source_of_weights_once_the_run_has_a_checkpoint(tmp_path):
    (tmp_path / "save" / "CKPT+2026").mkdir(parents=True)
    overrides = {"Transformer": {"nhead": 3}, "init_from": str(tmp_path / "gone"), "output_folder": str(tmp_path)}
    assert keys_of_errors(SMALL, overrides) == ["Transformer.nhead"]
