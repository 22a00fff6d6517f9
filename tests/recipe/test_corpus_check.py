"""Checks of a recipe's corpus: that its source is there."""

from pathlib import Path

import pytest

from sbkit.recipe.check import check

SMALL = Path(__file__).parent / "small.yaml"


@pytest.fixture
def elsewhere(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"recipe: !include:{SMALL}\n    seed: 2\n    data_folder: {tmp_path / 'gone'}\n")
    return path


@pytest.mark.slow
def test_a_corpus_on_another_machine_is_a_warning(elsewhere, tmp_path):
    report = check(elsewhere)
    assert [(each.code, Path(each.file), each.line) for each in report.warnings] == [("no-corpus", elsewhere, 3)]
    assert f"{tmp_path / 'gone'}: no such file or folder on this machine" in report.problems()
    assert not report.errors


@pytest.mark.slow
@pytest.mark.parametrize("starting, given", [(True, {}), (True, {"data_folder": "./gone"}),
                                             (False, {"data_folder": "./gone"})])
def test_a_corpus_that_is_missing_where_the_run_starts_is_an_error(elsewhere, starting, given):
    report = check(elsewhere, given, starting=starting)
    assert [each.code for each in report.errors] == ["no-corpus"]
    assert ("--data_folder: ./gone" if given else f"{elsewhere}:3: error: data_folder") in report.problems()


def test_a_corpus_that_is_there_is_not_told_of(elsewhere, tmp_path):
    (tmp_path / "gone").mkdir()
    assert not check(elsewhere, starting=True).problems()


def test_a_demo_corpus_that_nobody_can_speak_is_told_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "mine.yaml"
    path.write_text(f"recipe: !include:{SMALL}\n    corpus: {{language: klingon}}\n")
    [told] = check(path, starting=True).errors
    assert (told.code, Path(told.file), told.line) == ("no-corpus", path, 2)
    assert "knows no language 'klingon'" in told.message
