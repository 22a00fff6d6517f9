"""A run that replays what its source learnt: the old test is scored before and after, and guards the export."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from processes import ROOT, sbkit
from run_folders import TINY
from trained_runs import copied, different, go_on, here, metrics, options, outcome, tones

from sbkit.runs.replay import NEW
from sbkit.score.old_set import OLD, OldSet

OPTIONS = {**TINY, "precision": "fp32", "log_interval": 0, "max_batch_seconds": 20, "step_seconds": 4, "lr": 0.01,
           "intermediate_ctc": 0, "spec_augment": "null", "schedule.max_rise_per_step": "null",
           "schedule.max_lr_at_chance": "null", "number_of_epochs": 2}


def words(folder: Path, data: Path, **keys: object) -> list[str]:
    given = options(**{**OPTIONS, "output_folder": folder, "data_folder": data, **keys})
    return ["train", f"{ROOT}/hparams/ctc.yaml", "--noprogressbar", "--no-check", *given]


def exported(run: Path, *more: object, code: int = 0) -> str:
    done = sbkit("export", run, "--to", run / "bundle", "--formats", "speechbrain", "--clips", 2, *more, code=code)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Recordings of three words, and the same recordings with other words for them."""
    folder = tmp_path_factory.mktemp("replay")
    for name in ("old", "new"):
        tones(folder / name, 60, 12)
    for path in (folder / "new").glob("*.csv"):
        text = path.read_text()
        for word, other in (("low", "tief"), ("high", "hoch"), ("both", "ñu")):
            text = re.sub(f",{word}$", f",{other}", text, flags=re.M)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def learnt(folder) -> Path:
    """There, a run that has learnt the words."""
    sbkit(*words(folder / "source", folder / "old", min_steps=500))
    return folder


def replaying(folder: Path, name: str, **keys: object) -> list[str]:
    return words(folder / name, folder / "new", **{"language": "de", "init_from": folder / "source", **keys})


@pytest.mark.long
@pytest.mark.slow
def test_a_model_that_forgot_is_not_exported_unless_that_is_accepted(learnt):
    run, given = learnt / "forgot", replaying(learnt, "forgot", replay=0.05, min_steps=250)
    done = sbkit(*given, cards=True)
    said = done.stdout + done.stderr
    assert "The initial model on the old test set: WER" in said
    known = OldSet.read(run)
    tested = json.loads((run / "tested.json").read_text())
    assert known.before < 50 and tested[f"WER {OLD}"] > known.interval[1], "one recording can't have both words"
    assert "After training: WER" in said and "beyond the interval" in said
    assert "forgot what it had learnt" in (run / "report.html").read_text()
    heard = next(line for line in metrics(run) if f"hours {NEW}" in line)
    assert heard[f"hours {OLD}"] / heard[f"hours {NEW}"] == pytest.approx(0.05 / 0.95, rel=0.1)
    for more in ((), ("--mean", 1)):
        said = exported(run, *more, code=2)
        assert "the model forgot: WER" in said and "--accept-worse" in said, said
        assert ("old test:" in said) == bool(more), "what the test scored is not scored again"
    assert not (run / "bundle").exists()
    exported(run, "--mean", 0)
    assert json.loads((run / "bundle" / "config.json").read_text())["trained"]["mean_with_start"] == 0
    assert "of the initial weights" in (run / "bundle" / "README.md").read_text()
    exported(run, "--accept-worse", "--force")
    assert "The model forgot: WER" in (run / "bundle" / "README.md").read_text()
    assert "beyond the interval" in (run / "README.md").read_text() and "| WER new |" in (run / "README.md").read_text()
    OldSet("WER", True, 99.0, (0.0, 99.9)).write(run)  # of an easier judge, who takes any mean that hears a word
    done = sbkit(*given, "--test_only", cards=True)
    known = OldSet.read(run)
    assert known.share and known.old <= 99.9 and f"--mean {known.share:g}" in done.stderr, done.stderr[-2000:]
    assert f"WER {known.old:.2f} on the old test, within" in exported(run, "--mean", known.share, "--force")
    assert f"{known.share:g} of the new weights: old " in done.stderr
    (run / "old_set.json").unlink()
    assert "has no old_set.json" in exported(run, "--force", code=2)


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_bit_though_its_source_is_gone(folder):
    source = folder / "lent"
    here(*words(source, folder / "old", number_of_epochs=1))
    whole, killed = (replaying(folder, name, init_from=source, replay=0.3, min_steps=32, ckpt_interval_steps=7)
                     for name in ("whole", "killed"))
    with copied(folder / "whole", 14, folder / "killed"):
        here(*whole)
    assert not (folder / "killed" / "tested.json").exists()
    was_killed, never_killed = (OldSet.read(folder / name) for name in ("killed", "whole"))
    assert (was_killed.before, was_killed.interval) == (never_killed.before, never_killed.interval)
    OldSet("WER", True, 5.0, (0.0, 10.0)).write(folder / "killed")  # as of a source that has learnt
    shutil.rmtree(source)
    said = go_on(folder / "killed", *killed)
    assert "Continuing with epoch" in said
    assert different(outcome(folder / "killed"), outcome(folder / "whole")) == []
    assert "no mean of old and new weights could be tried" in said, "that needs the source"


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_score_the_old_test_as_one_does(learnt):
    for ranks in (1, 2):
        sbkit(*replaying(learnt, str(ranks), replay=0.5, min_steps=4), ranks=ranks, cards=True)
    one, two = (OldSet.read(learnt / name) for name in "12")
    assert one.before == two.before < 50 and one.interval == two.interval
