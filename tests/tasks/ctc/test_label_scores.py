"""Scores of labels, which a run's folder keeps until the checkpoint or a row changes."""

import json

import pytest
import run_folders

from sbkit.runs import restore
from sbkit.tasks.ctc import label_scores


@pytest.mark.slow
def test_scores_are_kept_beside_the_language_model_and_read_again(tmp_path, monkeypatch):
    data = run_folders.corpus(tmp_path / "data", train=4, dev=2, test=2)
    run = run_folders.run_with_model(tmp_path / "run", data)
    manifest = restore.read_run(run).keys.corpus.manifest("dev")

    scores = label_scores.score(run, manifest, "cpu")
    assert sorted(score.id for score in scores) == sorted(manifest.ids)
    assert (run / "labels.arpa").read_text().startswith("\\data\\")
    assert len(json.loads((run / "label_scores.json").read_text())["scores"]) == len(manifest)

    monkeypatch.setattr(label_scores.lm, "build", lambda *_, **__: pytest.fail("nothing has changed"))
    assert label_scores.score(run, manifest, "cpu") == scores
