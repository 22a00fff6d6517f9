"""Several speakers: each of a corpus becomes a voice of its own, and one who is not in the training set is no error."""

import pytest
import torch
from toy_voice import TEXT, corpus, labelled, spoken

from sbkit.errors import SbkitError


@pytest.fixture
def splits(tmp_path):
    return corpus(tmp_path, train=["ben", "anna", "ben", "anna"], dev=["anna", "carl"], test=["carl"])


def test_each_speaker_of_the_training_is_a_voice_and_sounds_like_nobody_else(tmp_path, splits):
    made, follows = labelled(tmp_path / "run", splits, speakers={"several": True})
    assert follows["n_speakers"] == 2 and made.keys.speakers.names == ["anna", "ben"]
    (ben, anna, again), _ = spoken(made, "train0", "train1", "dev0")
    assert torch.equal(anna, again)
    assert ben.shape != anna.shape or not torch.allclose(ben, anna)


def test_a_speaker_whom_training_never_heard_is_validated_and_tested_as_the_first(tmp_path, splits):
    made, _ = labelled(tmp_path / "run", splits, speakers={"several": True})
    (anna, carl), loss = spoken(made, "dev0", "dev1")
    assert torch.equal(anna, carl) and loss.count > 0 and torch.isfinite(loss.total)
    assert made.labels.get("dev", "dev1", TEXT).speaker == "carl"


def test_otherwise_whoever_speaks_is_one_voice(tmp_path, splits):
    made, follows = labelled(tmp_path / "run", splits)
    assert follows["n_speakers"] == 1 and made.keys.speakers.names == ["voice"]
    (ben, anna), _ = spoken(made, "train0", "train1")
    assert torch.equal(ben, anna)


def test_a_corpus_that_names_one_speaker_gives_the_voice_this_name(tmp_path):
    made, _ = labelled(tmp_path / "run", corpus(tmp_path, train=["linda"], dev=["linda"], test=["linda"]))
    assert made.keys.speakers.names == ["linda"]


def test_a_run_does_not_go_on_with_other_speakers(tmp_path, splits):
    labelled(tmp_path / "run", splits)
    with pytest.raises(SbkitError, match=r"speakers\.json does not match the corpus any more"):
        labelled(tmp_path / "run", splits, speakers={"several": True})
