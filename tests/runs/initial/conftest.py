"""A corpus, a run on it, and a bundle of that run, which tests only read."""

import json

import pytest
from run_folders import corpus, run_with_model

from sbkit.export import layout
from sbkit.runs.restore import load_run
from sbkit.tasks.ctc import speechbrain_folder


@pytest.fixture(scope="session")
def english(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("english") / "data", train=6, dev=2, test=2)


@pytest.fixture(scope="session")
def run(english):
    return run_with_model(english.parent / "run", english, normalize={"norm_type": "sentence"})


@pytest.fixture(scope="session")
def bundle(run):
    """As export writes what SpeechBrain reads."""
    recipe, brain = load_run(run, "cpu")
    folder = run.parent / "bundle"
    folder.mkdir()
    speechbrain_folder.write(folder, run, brain.acoustic_model, recipe.keys.tokenizer, 16000, 0, "bundle")
    (folder / "config.json").write_text(json.dumps({"format": layout.FORMAT}))
    return folder
