"""What a start writes over is put back by an error, until the run begins."""

import pytest

from sbkit.kept import Kept


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


def test_the_values_that_changed_are_known_until_the_run_begins(folder):
    (folder / "hyperparams.yaml").write_text("lr: 0.001\nd: &d 3\nold: 1\nopt: !name:torch.optim.Adam\n  lr: 0.001\n"
                                             "sizes: [1, 2]\nbetas: !tuple (1, 2)\n")
    with Kept(folder) as kept:
        assert kept.changes() == []
        (folder / "hyperparams.yaml").write_text("lr: 0.5\nd: 3\nnew: null\nopt: !name:torch.optim.Adam\n  lr: 0.5\n"
                                                 "sizes: [1, 3]\nbetas: !tuple (1, 2)\n")
        assert kept.changes() == ["lr 0.001 -> 0.5", "old 1 -> nothing", "sizes.1 2 -> 3", "new nothing -> null"]
        kept.begins()
        assert kept.changes() == []


def test_a_recipe_that_cannot_be_read_has_no_changes(folder):
    with Kept(folder) as kept:
        (folder / "hyperparams.yaml").write_text("{")
        assert kept.changes() == []
