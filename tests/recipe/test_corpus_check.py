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


COLUMNS = '''
from sbkit.data.columns import LabelColumn, SignalColumn
from sbkit.tasks.ctc import CTC


class Further(CTC):
    columns = {"clean": SignalColumn(), "speaker": LabelColumn()}
'''


def test_a_column_that_the_task_needs_and_the_corpus_lacks_is_an_error_where_the_corpus_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gone").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / "gone" / f"{split}.csv").write_text("ID,duration,wav,spk_id,wrd,clean_wav\n")
    (tmp_path / "further_columns.py").write_text(COLUMNS)
    path = tmp_path / "mine.yaml"
    text = f"recipe: !include:{SMALL}\n    data_folder: {tmp_path / 'gone'}\n    brain: !name:further_columns.Further\n"
    path.write_text(text)
    report = check(path)
    [told] = [each for each in report.errors if each.code == "columns"]
    assert Path(told.file).name in ("mine.yaml", "small.yaml") and told.line and "source" in told.key
    assert "has no column for the clean: looked for 'clean' among ID, duration, wav, spk_id, wrd, clean_wav" in \
        told.message and "columns: {clean: NAME}" in report.problems()
    path.write_text(f"{text}    corpus: {{columns: {{clean: clean_wav}}}}\n")
    assert not [each for each in check(path).errors if each.code == "columns"]
