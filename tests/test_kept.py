"""What a start writes over is put back by an error, until the run begins."""

from pathlib import Path

import pytest
from hyperpyyaml import resolve_references

from sbkit.kept import Kept
from sbkit.recipe import load


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "manifests").mkdir()
    for name in ("hyperparams.yaml", "tested.json", "manifests/train.csv", "wer_test.txt"):
        (tmp_path / name).write_text("before")
    return tmp_path


def written_over(folder):
    (folder / "hyperparams.yaml").write_text("now")
    (folder / "tested.json").unlink()
    (folder / "new.csv").write_text("now")
    (folder / "new.csv").replace(folder / "manifests" / "train.csv")  # as manifests are written


def texts(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_before_the_run_begins_puts_all_back(folder, error):
    before = texts(folder)
    with pytest.raises(error), Kept(folder):
        written_over(folder)
        raise error
    assert texts(folder) == before and not (folder / ".before-this-start").exists()


def test_what_was_written_stands_once_the_run_has_begun(folder):
    with pytest.raises(ValueError), Kept(folder) as kept:
        written_over(folder)
        kept.begins()
        assert not (folder / ".before-this-start").exists()
        raise ValueError
    assert texts(folder) == {"hyperparams.yaml": "now", "manifests/train.csv": "now", "wer_test.txt": "before"}


def test_without_an_error_nothing_is_put_back(folder):
    with Kept(folder):
        written_over(folder)
    assert texts(folder)["hyperparams.yaml"] == "now" and not (folder / ".before-this-start").exists()


def test_what_a_killed_start_left_is_not_taken_for_this_ones(folder):
    (folder / ".before-this-start").mkdir()
    (folder / ".before-this-start" / "hyperparams.yaml").write_text("older")
    with pytest.raises(ValueError), Kept(folder):
        raise ValueError
    assert texts(folder)["hyperparams.yaml"] == "before"


@pytest.mark.parametrize("here", [True, False])
def test_a_new_folder_and_other_ranks_are_left_alone(tmp_path, here):
    with Kept(tmp_path / "new", here):
        assert not (tmp_path / "new").exists()
    with Kept(tmp_path / "new", here) as kept:
        kept.begins()


def test_a_folder_that_cannot_be_written_is_the_starts_own_error(folder, monkeypatch):
    monkeypatch.setattr(Kept, "_keep", lambda self: (_ for _ in ()).throw(PermissionError(13, "no")))
    with pytest.raises(ValueError, match="the start's own"), Kept(folder):
        raise ValueError("the start's own")


def changes(folder, before, now):
    (folder / "hyperparams.yaml").write_text(before)
    with Kept(folder) as kept:
        assert kept.changes() == []
        (folder / "hyperparams.yaml").write_text(now)
        found = kept.changes()
        kept.begins()
        assert kept.changes() == []
    return found


def test_the_values_that_changed_are_known_until_the_run_begins(folder):
    before = "lr: 0.001\nd: 3\nold: 1\nopt: !name:torch.optim.Adam\n  lr: 0.001\nsizes: [1, 2]\nbetas: !tuple (1, 2)\n"
    now = "lr: 0.5\nd: 3\nnew: null\nopt: !name:torch.optim.Adam\n  lr: 0.5\nsizes: [1, 3]\nbetas: !tuple (1, 2)\n"
    assert changes(folder, before, now) == [
        "lr, opt.lr: 0.001 -> 0.5", "old: 1 -> nothing", "sizes.1: 2 -> 3", "new: nothing -> null"]


def test_another_class_is_a_change(folder):
    before = "brain: !name:mine.Brain\nopt: !name:torch.optim.Adam\n  lr: 1\n"
    assert changes(folder, before, before.replace("mine", "yours").replace("Adam", "AdamW")) == [
        "brain: !name:mine.Brain -> !name:yours.Brain", "opt: !name:torch.optim.Adam -> !name:torch.optim.AdamW"]


def test_what_many_refer_to_and_what_a_recipe_rests_on_is_told_once(folder, tmp_path):
    """Written as a run writes it."""
    told = []
    root = Path(__file__).parents[1]
    for recipe in (root / "hparams" / "ctc.yaml", root / "recipes/CommonVoice/ASR/CTC/hparams/fr.yaml"):
        texts = []
        for given in ({"data_folder": "here"}, {"data_folder": "here", "number_of_epochs": 21, "n_mels": 40}):
            with open(recipe) as stream:
                texts.append(resolve_references(stream, load.place(given, load.chain(recipe))).read())
        told.append(changes(folder, *texts))
    for found in told:
        (epochs,) = [line for line in found if line.startswith("number_of_epochs")]
        assert epochs.endswith("-> 21") and "recipe" not in str(found)
        (mels,) = [line for line in found if line.startswith("n_mels, ")]
        (width,) = [line for line in found if line not in (epochs, mels)]
        assert mels.endswith(": 80 -> 40") and width == "Transformer.input_size: 640 -> 320"


def test_a_recipe_that_cannot_be_read_has_no_changes(folder):
    assert changes(folder, "lr: 1", "{") == []
