"""What a start writes over is put back by an error, until the run begins."""

import errno
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused

from sbkit.errors import SbkitError
from sbkit.recipe import load
from sbkit.runs.start_guard import StartGuard, without_traces
from sbkit.system import processes


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
    with pytest.raises(error), StartGuard(folder):
        written_over(folder)
        raise error
    assert texts(folder) == before and not (folder / ".before-this-start").exists()


def test_what_was_written_stands_once_the_run_has_begun(folder):
    with pytest.raises(ValueError), StartGuard(folder) as kept:
        written_over(folder)
        kept.begins()
        assert not (folder / ".before-this-start").exists()
        raise ValueError
    assert texts(folder) == {"hyperparams.yaml": "now", "manifests/train.csv": "now", "wer_test.txt": "before"}


def test_without_an_error_nothing_is_put_back(folder):
    with StartGuard(folder):
        written_over(folder)
    assert texts(folder)["hyperparams.yaml"] == "now" and not (folder / ".before-this-start").exists()


def test_what_a_killed_start_left_is_put_back_by_the_next(folder):
    before = texts(folder)
    StartGuard(folder).__enter__()
    written_over(folder)
    (folder / "manifests" / "dev.csv").write_text("of the start that was killed")
    with pytest.raises(ValueError), StartGuard(folder):
        written_over(folder)
        raise ValueError
    assert texts(folder) == before and not list(folder.glob(".before*"))


def test_a_run_without_manifests_keeps_those_that_a_refused_start_made(folder):
    (folder / "manifests" / "train.csv").unlink()
    with pytest.raises(ValueError), StartGuard(folder):
        written_over(folder)
        raise ValueError
    assert texts(folder)["manifests/train.csv"] == "now"


def test_what_is_unpacked_beside_manifests_is_left_alone(folder):
    (folder / "manifests" / "audio").mkdir()
    (folder / "manifests" / "audio" / "clip").write_text("before")
    with pytest.raises(ValueError), StartGuard(folder):
        assert not list((folder / ".before-this-start").rglob("clip"))
        (folder / "manifests" / "audio" / "new clip").write_text("now")
        raise ValueError
    assert {"manifests/audio/clip", "manifests/audio/new clip"} < set(texts(folder))


OPERATIONS = ("mkdir", "rename", "replace", "link", "unlink", "rmdir")


def left_by_kills(folder, work, every=1):
    """Copies of the folder as a kill before each operation of ``work`` on the disk leaves it, or before one of some."""
    operations, left = itertools.count(), []

    def seen(original):
        def call(*args, **kwargs):
            if (number := next(operations)) % every == 0:
                left.append(folder.with_name(f"{folder.name}.{number}"))
                subprocess.run(["cp", "-a", folder, left[-1]], check=True)
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        for name in OPERATIONS:
            patch.setattr(os, name, seen(getattr(os, name)))
        work(folder)
    return left


def refused_start(folder, number=3):
    with StartGuard(folder):
        (folder / "hyperparams.yaml").write_text(f"start {number}")
        (folder / "new.csv").write_text(f"start {number}")
        os.replace(folder / "new.csv", folder / "manifests" / "train.csv")
        (folder / "manifests" / "dev.csv").write_text(f"start {number}")
        raise ZeroDivisionError


def test_killed_at_any_operation_the_next_start_still_puts_back_all(folder):
    before = texts(folder)
    kills = left_by_kills(folder, lambda folder: refused_start(folder, 1))
    assert len(kills) > (20 if sys.version_info >= (3, 11) else 12)  # pathlib binds some at import in Python 3.10
    for left in kills:
        for again in left_by_kills(left, lambda folder: refused_start(folder, 2), every=9):  # the start after it, too
            with pytest.raises(ZeroDivisionError):
                refused_start(again)
            (again / "new.csv").unlink(missing_ok=True)  # the test's own
            assert texts(again) == before and not list(again.glob(".before*")), again


def begun(folder):
    with StartGuard(folder) as kept:
        (folder / "hyperparams.yaml").write_text("of the run that began")
        kept.begins()
        raise ZeroDivisionError


def test_killed_while_a_run_begins_it_has_begun_or_not(folder):
    found = []
    for left in left_by_kills(folder, begun):
        with pytest.raises(ZeroDivisionError):
            refused_start(left)
        assert not list(left.glob(".before*"))
        found.append(texts(left)["hyperparams.yaml"])
    assert set(found) == {"before", "of the run that began"} and found == sorted(found)


@pytest.mark.parametrize("here", [True, False])
def test_a_new_folder_and_other_ranks_are_left_alone(tmp_path, here):
    with StartGuard(tmp_path / "new", here):
        assert not (tmp_path / "new").exists()
    with StartGuard(tmp_path / "new", here) as kept:
        kept.begins()


def test_where_there_is_no_room_to_keep_it_aside_nothing_is_written_over(folder, monkeypatch):
    def full(*given, **options):
        raise OSError(errno.ENOSPC, "no", str(folder))

    monkeypatch.setattr("shutil.copy2", full)
    with refused("disk-full", wording=False), StartGuard(folder):
        raise AssertionError("it began")


def changes(folder, before, now):
    (folder / "hyperparams.yaml").write_text(before)
    with StartGuard(folder) as kept:
        assert kept.changes() == []
        (folder / "hyperparams.yaml").write_text(now)
        found = kept.changes()
        kept.begins()
        assert kept.changes() == []
    return found


def test_the_values_that_changed_are_known_until_the_run_begins(folder):
    same = "d: 3\nbetas: !tuple (1, 2)\n"
    before = same + "lr: 0.001\nold: 1\nopt: !name:torch.optim.Adam\n  lr: 0.001\nsizes: [1, 2]\nname: ''\n"
    now = same + "lr: 0.5\nnew: null\nopt: !name:torch.optim.Adam\n  lr: 0.5\nsizes: [1, 3]\nname: a\n"
    assert changes(folder, before, now) == [
        "lr, opt.lr: 0.001 -> 0.5", "old: 1 -> nothing", "name: '' -> a", "sizes[1]: 2 -> 3", "new: nothing -> null"]


def test_of_another_recipe_the_first_changes_are_told(folder):
    told = changes(folder, "lr: 1\n", "".join(f"key{i}: {'x' * 500}{i}\n" for i in range(40)))
    assert len(told) == 11 and told[-1].startswith("and ") and max(map(len, told)) < 350


def test_another_class_is_a_change(folder):
    before = "brain: !name:mine.Brain\nopt: !name:torch.optim.Adam\n  lr: 1\n"
    assert changes(folder, before, before.replace("mine", "yours").replace("Adam", "AdamW")) == [
        "brain: !name:mine.Brain -> !name:yours.Brain", "opt: !name:torch.optim.Adam -> !name:torch.optim.AdamW"]


def test_what_many_refer_to_and_what_a_recipe_rests_on_is_told_once(folder, tmp_path):
    """Written as a run writes it."""
    told = []
    root = Path(__file__).parents[2]
    for recipe in (root / "hparams" / "ctc.yaml", root / "recipes/CommonVoice/ASR/CTC/hparams/large.yaml"):
        texts = []
        for given in ({"data_folder": "here", "language": "fr"},
                      {"data_folder": "here", "language": "fr", "number_of_epochs": 21, "n_mels": 40}):
            texts.append(load.merged(recipe, given))
        told.append(changes(folder, *texts))
    for found in told:
        (epochs,) = [line for line in found if line.startswith("number_of_epochs")]
        assert epochs.endswith("-> 21") and "recipe" not in str(found)
        (mels,) = [line for line in found if line.startswith("n_mels, ")]
        (width,) = [line for line in found if line not in (epochs, mels)]
        assert mels.endswith(": 80 -> 40") and width == "Transformer.input_size: 640 -> 320"


def test_an_output_folder_that_moved_changes_no_other_value(folder):
    text = "output_folder: {0}\nsave: {0}/save\nlr: {1}\n"
    assert changes(folder, text.format("old/run", 1), text.format("new", 1)) == []
    assert changes(folder, text.format("old/run", 1), text.format("new", 2)) == ["lr: 1 -> 2"]
    there = "output_folder: {0}\nlanguage: {0}\ndata_folder: data/{0}\n"
    assert changes(folder, there.format("en"), there.format("de")) == ["data_folder: data/en -> data/de"]


def test_a_name_of_an_earlier_version_is_no_change(folder):
    text = "schedule: !new:sbkit.train.schedule.Schedule {{peak: 1, {0}: {1}}}"
    assert changes(folder, text.format("rise", 2), text.format("max_rise_per_step", 2)) == []
    assert changes(folder, text.format("rise", 2), text.format("max_rise_per_step", 3)) == [
        "schedule.max_rise_per_step: 2 -> 3"]


def test_a_recipe_that_cannot_be_read_has_no_changes(folder):
    assert changes(folder, "lr: 1", "{") == []


def in_folder(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("left, kept", [
    ({}, []),
    ({"run/manifests/.durations-1": "[1]\n"},
     ["new", "new/run", "new/run/manifests", "new/run/manifests/.durations-1"]),
    ({"run/.held-2.json": "{}"}, ["new", "new/run", "new/run/.held-1.json", "new/run/.held-2.json", "new/run/manifests",
                                  "new/run/manifests/.lock", "new/run/save"])],
    ids=["nothing", "measured durations", "another process"])
def test_a_failure_leaves_no_locks_and_empty_folders_in_a_folder_that_it_made(tmp_path, left, kept):
    run = tmp_path / "new" / "run"
    with refused("no-clips"), without_traces(run):
        (run / "save").mkdir(parents=True)
        (run / "manifests").mkdir()
        (run / "manifests" / ".lock").touch()
        (run / ".held-1.json").write_text(json.dumps({"pid": os.getpid(), "born": processes.born(os.getpid())}))
        for name, text in left.items():
            (tmp_path / "new" / name).write_text(text)
        raise SbkitError("no-clips", "no clips")
    assert in_folder(tmp_path) == kept


def test_a_folder_that_another_process_works_in_by_now_is_left_alone(tmp_path):
    with refused("folder-in-use"), without_traces(tmp_path / "run"):
        (tmp_path / "run" / "save").mkdir(parents=True)
        (tmp_path / "run" / ".held-1.json").write_text(
            json.dumps({"pid": os.getppid(), "born": processes.born(os.getppid())}))
        raise SbkitError("folder-in-use", "in use")
    assert in_folder(tmp_path) == ["run", "run/.held-1.json", "run/save"]


def test_a_failure_in_an_older_folder_and_a_success_remove_nothing(tmp_path):
    (tmp_path / "old" / "save").mkdir(parents=True)
    with refused("no-clips"), without_traces(tmp_path / "old"):
        raise SbkitError("no-clips", "no clips")
    with without_traces(tmp_path / "new" / "run"):
        (tmp_path / "new" / "run").mkdir(parents=True)
    assert in_folder(tmp_path) == ["new", "new/run", "old", "old/save"]
