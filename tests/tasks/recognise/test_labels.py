"""Labels fit the vocabulary and the audio is long enough for them, utterance by utterance."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.data.manifest import Manifest
from sbkit.data.tokens import Tokenizer
from sbkit.nn.ctc import ctc_frames_needed
from sbkit.recipe.check import check
from sbkit.recipe.load import load
from sbkit.recipe.source import Findings
from sbkit.tasks.ctc import CTC
from sbkit.tasks.recognise import labels

SMALL = Path(__file__).parents[2] / "recipe" / "small.yaml"
TEXTS = ["aa b", "abc abc", "cab", "bac", "ab"] * 4


class Spelling:
    """A tokenizer of which each letter is an id: a is 1, and ! is the blank; it has none for ?."""

    def encode(self, text):
        return ["!abcdefgh".index(char) for char in text if char != "?"]


class Even:
    """One frame for each 160 samples."""

    def frames(self, samples):
        return samples // 160


def manifest(texts, seconds):
    n = len(texts)
    return Manifest(ids=[f"u{i}" for i in range(n)], durations=np.full(n, seconds), wavs=["x.wav"] * n, texts=texts)


def test_utterances_are_named_by_what_is_wrong_with_them():
    checked, outside, short, empty = labels.find_problems(
        manifest(["ab", "?", "aab", "a!", "ah", "abc", ""], 0.03), Spelling(), Even(), 8, 16_000)
    assert checked == 7
    assert outside == ["u3", "u4"]  # a blank, and an id beyond 7
    assert short == ["u2"]  # three letters and a repeat need four frames, there are three
    assert empty == ["u1"], "in the last one nobody speaks"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("abc", min_size=0, max_size=9), min_size=1, max_size=8), st.integers(1, 12))
def test_frames_are_counted_as_the_loss_counts_them(texts, frames):
    _, _, short, _ = labels.find_problems(manifest(texts, frames * 0.01), Spelling(), Even(), 8, 16_000)
    width = max(1, *map(len, texts))
    targets = torch.zeros(len(texts), width, dtype=torch.long)
    for i, text in enumerate(texts):
        targets[i, : len(text)] = torch.tensor(Spelling().encode(text), dtype=torch.long)
    needed = ctc_frames_needed(targets, torch.tensor([len(text) for text in texts]))
    assert short == [f"u{i}" for i in (needed > frames).nonzero().flatten().tolist()]


def test_of_a_large_split_the_densest_are_looked_at(monkeypatch):
    monkeypatch.setattr(labels, "MAX_CHECKED", 3)
    checked, _, short, _ = labels.find_problems(
        manifest(["a", "abcabc", "ab", "abcab", "abcabca"], 0.05), Spelling(), Even(), 8, 16_000)
    assert (checked, short) == (3, ["u1", "u4"])


@pytest.fixture
def prepared(tmp_path):
    """The small recipe after a run has prepared its corpus."""
    def make(texts=TEXTS, seconds=1.0, **overrides):
        given = {"output_folder": str(tmp_path), **overrides}
        hparams = load(SMALL, given)
        (tmp_path / "manifests").mkdir(exist_ok=True)
        for split in ("train", "dev"):
            manifest(texts, seconds).write(hparams["corpus"].manifest_path(split))
        Tokenizer(tmp_path / "save", 10, "unigram").prepare(TEXTS)
        return given | {"output_neurons": overrides.get("output_neurons", 10)}
    return make


@pytest.mark.slow
def test_a_prepared_corpus_is_compared_with_the_model(prepared):
    report = check(SMALL, prepared(nonspeech=None))
    assert report.errors == []
    assert [row[:3] for row in report.sections["labels"].rows] == [["train", 20, 20], ["dev", 20, 20]]
    assert [row[0] for row in report.sections["cost"].rows][-2:] == [
        "time of an epoch, 20 s of audio, one cpu", "time of the run, 2 epochs, one cpu"]


@pytest.mark.slow
@pytest.mark.usefixtures("without_trials")
@pytest.mark.parametrize(("kind", "size", "checked"), [("char", 20, False), ("unigram", 20, False), ("char", 7, True)])
def test_why_the_labels_of_a_prepared_corpus_are_not_checked_is_said(prepared, tmp_path, kind, size, checked):
    Tokenizer(tmp_path / "save", 7, "char").prepare(TEXTS)
    report = check(SMALL, prepared(output_neurons=size, tokenizer={"model_type": kind}))
    assert ("labels" in report.sections) == checked
    assert ["with the same recipe and keys, creates it" in note for note in report.notes
            if note.startswith("labels")] == [True] * (not checked)


@pytest.mark.slow
@pytest.mark.usefixtures("without_trials")
@pytest.mark.parametrize(("kind", "checked_with"), [("char", 7), ("unigram", 20)])
def test_a_recipe_is_checked_with_as_many_tokens_as_the_prepared_corpus_has_characters(prepared, tmp_path, kind,
                                                                                      checked_with):
    Tokenizer(tmp_path / "save", 7, "char").prepare(TEXTS)
    given = prepared()
    del given["output_neurons"]
    path = tmp_path / "recipe.yaml"
    path.write_text(f"recipe: !include:{SMALL}\n    output_neurons: 20\n    tokenizer: {{model_type: {kind}}}\n")
    report = check(path, given)
    assert ("labels" in report.sections) == (checked_with == 7) and not report.problems()
    assert report.sections["shapes"].rows[-1][-1].endswith(f", {checked_with}]")


@pytest.mark.slow
def test_an_epoch_that_goes_through_its_corpus_several_times_is_counted_so(prepared):
    report = check(SMALL, prepared(nonspeech=None) | {"batching": {"min_steps": 198}})
    assert [row[0] for row in report.sections["cost"].rows][-2:] == [
        "time of an epoch, 33 min of audio, 99 times 20 s, one cpu", "time of the run, 2 epochs, one cpu"]


@pytest.mark.slow
@pytest.mark.usefixtures("without_trials")
def test_utterances_too_short_are_warned_of_and_too_many_are_an_error(prepared):
    given = prepared(seconds=0.12)  # 13 frames, 7 after subsampling
    long = ["abcabcabcabcabcabcabc"]
    report = check(SMALL, prepared(TEXTS + long, seconds=0.12))
    assert [(f.code, f.severity) for f in report.findings] == [("too-short", "warning")] * 2
    assert "1 of 21 utterances have fewer encoder frames" in report.warnings[0].message
    assert report.warnings[0].message.endswith("u20")
    prepared(long * 3, seconds=0.12)
    assert [(f.code, f.severity) for f in check(SMALL, given).errors] == [("too-short", "error")] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("without_trials")
def test_the_tokenizer_on_disk_decides_the_size(prepared):
    given = prepared()
    model = Path(given["output_folder"]) / "save" / "10_unigram.model"
    (error,) = check(SMALL, given | {"output_neurons": 12, "tokenizer": {"model": str(model)}}).errors
    assert error.key == "output_neurons" and "has 10 entries" in error.message
    assert error.suggestion == "set output_neurons (which the tokenizer's vocab_size follows) to 10"


def test_labels_can_be_looked_at_after_preparing(prepared):
    given = prepared()
    keys = CTC.Keys.read(load(SMALL, given))
    findings = Findings()
    CTC.check_labels(keys, {"train": manifest(TEXTS, 1.0)}, findings, {})
    assert findings == []
    CTC.check_labels(keys, {"train": manifest(["abc" * 30], 0.1)}, findings, {})
    assert [f.code for f in findings] == ["too-short"]
