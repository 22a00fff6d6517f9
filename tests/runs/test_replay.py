"""What a model has learnt from is found and joined with a new corpus, and mistakes about it are told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refused
from run_folders import corpus

from sbkit.data.corpus import Corpus
from sbkit.errors import SbkitError
from sbkit.runs import old_set
from sbkit.runs.replay import NEW, problems, with_replay
from sbkit.score.old_set import OLD, OldSet
from sbkit.score.weights import BEST_CHECKPOINT


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder with what it was trained on, in capitals."""
    data = corpus(tmp_path / "en", train=8, dev=2, test=2)
    Corpus(str(data), "en", tmp_path / "run" / "manifests", text={"replace": {"e": "ee"}}).prepare(show_progress=False)
    (tmp_path / "run" / "hyperparams.yaml").write_text("sample_rate: 16000\n")
    (tmp_path / "run" / "save" / "CKPT+1").mkdir(parents=True)
    (tmp_path / "run" / "bundle").mkdir()
    return tmp_path / "run"


def keys(folder: Path, **given: object) -> SimpleNamespace:
    """Those of a recipe for another corpus."""
    new = Corpus(str(corpus(folder / "es", train=4, dev=2, test=3)), "es", folder / "mine" / "manifests",
                 max_duration=20)
    return SimpleNamespace(**{"corpus": new, "sample_rate": 16_000, "replay": 0.2, "replay_from": None, **given})


@pytest.mark.parametrize("start", ["", "save", "save/CKPT+1", "bundle"])
def test_the_corpus_of_a_run_is_found_from_it_and_from_what_lies_in_it(run, start):
    joint = with_replay(keys(run.parent, init_from=str(run / start)))
    assert joint.parts[OLD].source == run / "manifests" and joint.parts[OLD].language == "en"
    assert joint.parts[OLD].text.replace == {"e": "ee"}, "it is written by the run's own rules"
    assert joint.parts[OLD].max_duration == 20, "what is too long for this run is left out"
    assert (joint.language, joint.text) == ("es", joint.parts[NEW].text)
    found = joint.prepare(show_progress=False, needed=("train", "dev", "test"))
    assert {split: len(each) for split, each in found.items()} == {"train": 12, "dev": 4, "test": 5}
    assert found["train"].shares == {NEW: 0.8, OLD: 0.2} and found["train"].once == NEW == joint.best_by
    assert list(found["dev"].column("language")) == ["es", "es", "en", "en"]
    before = Corpus(folder=run / "manifests").manifest("train")
    assert list(found["train"].texts)[4:] == list(before.texts), "a replacement isn't made twice"


@pytest.mark.parametrize("named", ["run", "run/manifests", "en"])
def test_a_corpus_can_be_named(run, named):
    joint = with_replay(keys(run.parent, init_from="owner/model", replay_from=str(run.parent / named)))
    assert len(joint.prepare(show_progress=False)["train"]) == 12
    assert joint.parts[OLD].language == ("en" if named != "en" else None)


@pytest.mark.parametrize("named", [None, "run/manifests"])
def test_a_run_that_has_begun_needs_its_source_no_more(run, named):
    there = keys(run.parent, init_from=str(run), replay_from=named and str(run.parent / named))
    before = with_replay(there).prepare(show_progress=False)["train"].digest()
    shutil.rmtree(run)
    again = with_replay(there)
    for _ in range(2):
        assert again.prepare(show_progress=False)["train"].digest() == before and not list(problems(there))
    shutil.rmtree(there.corpus.folder)
    with pytest.raises(SbkitError, match=r"doesn't exist|no such file or folder"):
        with_replay(there)


def test_what_lies_beside_is_not_what_it_learnt(run, monkeypatch):
    """Manifests of a working directory, in which nothing was trained, or whose model is elsewhere."""
    monkeypatch.chdir(run.parent)
    shutil.copytree(run / "manifests", run.parent / "manifests")
    (run.parent / "model").mkdir()
    for source in ("owner/model", "model"):
        with refused("unknown-corpus", key="replay"):
            with_replay(keys(run.parent, init_from=source))
    monkeypatch.chdir(run)
    with refused("unknown-corpus", key="replay"):
        with_replay(keys(run.parent, init_from="owner/model"))


@pytest.mark.parametrize("source", ["gone", "run/gone", "./owner/model"])
def test_a_source_that_is_not_there_is_the_mistake_of_init_from(run, monkeypatch, source):
    monkeypatch.chdir(run.parent)
    (problem,) = problems(keys(run.parent, init_from=source))
    assert (problem.key, problem.message) == ("init_from", f"{source} doesn't exist")


def test_a_run_that_replays_is_resumed_with_both_keys(run):
    there = keys(run.parent, init_from=None, output_folder=str(run))
    for began, hint in (("", "write init_from: RUN"), ("init_from: en\nreplay: 0.1\nreplay_from: null\n", "resume "
                        f"the run in {run} with --init_from en --replay 0.1")):
        (run / "hyperparams.yaml").write_text(f"sample_rate: 16000\n{began}")
        (problem,) = problems(there)
        assert (problem.key, problem.hint) == ("replay", hint)


def test_an_old_corpus_without_a_test_is_refused(run):
    for split in ("dev", "test"):
        (run.parent / "en" / f"{split}.csv").unlink()
    joint = with_replay(keys(run.parent, init_from="owner/model", replay_from=str(run.parent / "en")))
    with refused("missing-split", key="replay"):
        joint.prepare(show_progress=False, needed=("train", "dev", "test"))


@pytest.mark.parametrize("report", ["[]", '{"options": []}', '{"options": {"text": null}}', "{"])
def test_a_report_that_says_nothing_leaves_the_new_rules(run, report):
    (run / "manifests" / "prepare_report.json").write_text(report)
    joint = with_replay(keys(run.parent, init_from=str(run)))
    assert joint.parts[OLD].text is joint.parts[NEW].text


def test_another_rate_is_refused(run):
    there = keys(run.parent, init_from=str(run), sample_rate=8000)
    there.corpus = with_replay(there)
    (problem,) = problems(there)
    assert problem.key == "sample_rate" and "it is 8000, but " in problem.message and "16000" in problem.hint


def test_other_rules_of_writing_are_refused(run):
    there = keys(run.parent, init_from=str(run))
    there.corpus.text = Corpus(None, "es", text={"case": "upper"}).text
    (problem,) = problems(there)
    assert problem.key == "replay" and "text.case is 'upper' and 'lower'" in problem.message


def test_weights_that_forgot_are_refused_unless_that_is_accepted(run, capsys):
    there = keys(run.parent, init_from=str(run))
    there.corpus, there.folder, there.tested_weights = with_replay(there), run, BEST_CHECKPOINT

    def guarded(accept_worse):
        return old_set.guard(SimpleNamespace(keys=there), None, there.tested_weights, accept_worse)

    with refused("no-old-test", file=run):
        guarded(False)
    assert guarded(True) == "The result of the old test is unknown."
    OldSet("WER", True, 20.0, (10.0, 30.0), 0.5, 25.0, 40.0).write(run)
    (run / "tested.json").write_text(json.dumps({f"WER {OLD}": 30.0}))
    assert guarded(False).startswith("WER 30.00 on the old test, within the interval")
    (run / "tested.json").write_text(json.dumps({f"WER {OLD}": 30.1}))
    with refused("forgot", file=run):
        guarded(False)
    assert guarded(True).startswith("The model forgot: WER 30.10")
