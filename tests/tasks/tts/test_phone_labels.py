"""A voice that learns phones: their durations are those of the characters that they stand for."""

import pytest
import torch
from refusals import refused
from toy_voice import TEXT, corpus, labelled, spoken

from sbkit.data import demo_voice
from sbkit.data.manifest import Manifest
from sbkit.data.pronunciation import pronunciation
from sbkit.tasks.tts import labels

SOUNDS = {"a": "ˈeɪ", "one": "wˈʌn", "two": "tˈuː"}
PHONES = {"symbols": {"spelling": "xx"}}


@pytest.fixture
def sounds(monkeypatch):
    """What each word sounds like, which may change."""
    found = dict(SOUNDS)
    monkeypatch.setattr(demo_voice, "pronounce", lambda words, voice: [found[word] for word in words])
    pronunciation.cache_clear()
    yield found
    pronunciation.cache_clear()


@pytest.fixture
def splits(tmp_path):
    return corpus(tmp_path, train=["a", "a"], dev=["a"], test=["a"])


def test_phones_have_the_time_of_their_words_and_are_spoken(tmp_path, splits, sounds):
    made, follows = labelled(tmp_path / "run", splits, **PHONES)
    assert follows["n_symbols"] == 1 + len(set("wˈʌn tˈuː"))
    frames = made.labels.get("train", "train0", TEXT).frames
    assert len(frames) == len("wˈʌn tˈuː") + 2 and frames.sum() == 31
    assert frames[[2, 7, 9]].tolist() == [0, 0, 0], "stress and length take no time of their own"
    characters, _ = labelled(tmp_path / "plain", splits)
    plain = characters.labels.get("train", "train0", TEXT).frames
    words = [frames[1:5].sum(), frames[5], frames[6:10].sum()]
    assert words == [plain[1:4].sum(), plain[4], plain[5:8].sum()]
    (sound, again), loss = spoken(made, "train0", "dev0")
    assert torch.equal(sound, again) and torch.isfinite(loss.total)


def test_a_run_that_began_does_not_go_on_where_a_word_is_pronounced_otherwise(tmp_path, splits, sounds, monkeypatch):
    made, _ = labelled(tmp_path / "run", splits, **PHONES)
    before = labels.label_facts(made.keys)
    sounds["two"] = "tˈuːw"
    pronunciation.cache_clear()
    made, _ = labelled(tmp_path / "run", splits, **PHONES)
    assert labels.label_facts(made.keys) != before, "with no checkpoint yet, the corpus is labelled again"
    assert len(made.labels.get("dev", "dev0", TEXT).frames) == len("wˈʌn tˈuːw") + 2
    monkeypatch.setattr(labels.initial, "fresh", lambda keys: False)
    sounds["two"] = "tˈuːn"
    pronunciation.cache_clear()
    with refused("changed-source"):
        labelled(tmp_path / "run", splits, **PHONES)


def test_a_text_with_a_sound_that_training_never_had_has_no_labels(tmp_path, splits, sounds):
    sounds["wont"] = "wˈoʊnt"
    rows = splits["dev"]
    splits["dev"] = Manifest(ids=rows.ids, durations=rows.durations, wavs=rows.wavs, texts=["wont"])
    with refused("not-labelled"):
        labelled(tmp_path / "run", splits, **PHONES)
