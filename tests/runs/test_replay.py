"""What a model has learnt from is found and joined with a new corpus, and mistakes about it are told."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_folders import corpus

from sbkit.data.corpus import Corpus
from sbkit.errors import SbkitError
from sbkit.runs.replay import NEW, OLD, problems, replayed


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder with what it was trained on, in capitals."""
    data = corpus(tmp_path / "en", train=8, dev=2, test=2)
    Corpus(str(data), "en", tmp_path / "run" / "manifests", text={"replace": {"z": "s"}}).prepare(show_progress=False)
    (tmp_path / "run" / "hyperparams.yaml").write_text("sample_rate: 16000\n")
    (tmp_path / "run" / "save" / "CKPT+1").mkdir(parents=True)
    return tmp_path / "run"


def keys(folder: Path, **given: object) -> SimpleNamespace:
    """Those of a recipe for another corpus."""
    new = Corpus(str(corpus(folder / "es", train=4, dev=2, test=3)), "es", folder / "mine" / "manifests",
                 max_duration=20)
    return SimpleNamespace(**{"corpus": new, "sample_rate": 16_000, "replay": 0.2, "replay_from": None, **given})


@pytest.mark.parametrize("start", ["", "save", "save/CKPT+1", "bundle"])
def test_the_corpus_of_a_run_is_found_from_it_and_from_what_lies_in_it(run, start):
    joint = replayed(keys(run.parent, init_from=str(run / start)))
    assert joint.parts[OLD].source == run / "manifests" and joint.parts[OLD].language == "en"
    assert joint.parts[OLD].text.replace == {"z": "s"}, "it is written by the run's own rules"
    assert joint.parts[OLD].max_duration == 20, "what is too long for this run is left out"
    assert (joint.language, joint.text) == ("es", joint.parts[NEW].text)
    found = joint.prepare(show_progress=False, needed=("train", "dev", "test"))
    assert {split: len(each) for split, each in found.items()} == {"train": 12, "dev": 4, "test": 5}
    assert found["train"].shares == {NEW: 0.8, OLD: 0.2} and found["train"].once == NEW == joint.best_by
    assert list(found["dev"].column("language")) == ["es", "es", "en", "en"]


@pytest.mark.parametrize("named", ["run", "run/manifests", "en"])
def test_a_corpus_can_be_named(run, named):
    joint = replayed(keys(run.parent, init_from="owner/model", replay_from=str(run.parent / named)))
    assert len(joint.prepare(show_progress=False)["train"]) == 12
    assert joint.parts[OLD].language == ("en" if named != "en" else None)


@pytest.mark.parametrize("named", [None, "run/manifests"])
def test_a_run_that_has_begun_needs_its_source_no_more(run, named):
    there = keys(run.parent, init_from=str(run), replay_from=named and str(run.parent / named))
    before = replayed(there).prepare(show_progress=False)["train"].digest()
    shutil.rmtree(run)
    again = replayed(there)
    assert again.prepare(show_progress=False)["train"].digest() == before and not list(problems(there))
    shutil.rmtree(there.corpus.folder)
    with pytest.raises(SbkitError, match=r"has no manifests/prepare_report\.json|no such file or folder"):
        replayed(there)


def test_another_rate_is_refused(run):
    there = keys(run.parent, init_from=str(run), sample_rate=8000)
    there.corpus = replayed(there)
    (problem,) = problems(there)
    assert problem.key == "sample_rate" and "it is 8000, and that of" in problem.message and "16000" in problem.hint


def test_other_rules_of_writing_are_refused(run):
    there = keys(run.parent, init_from=str(run))
    there.corpus.text = Corpus(None, "es", text={"case": "upper"}).text
    (problem,) = problems(there)
    assert problem.key == "replay" and "text.case is 'upper' and 'lower'" in problem.message
