"""Folds of training rows: no sentence is in two, and another corpus gets other runs."""

import random
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_folders
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.data.text import AsWritten, TextRules
from sbkit.recipe import arguments, load
from sbkit.runs import folds


@given(st.lists(st.sampled_from("abcdefgh"), min_size=8), st.integers(2, 8), st.randoms())
def test_a_sentence_is_in_one_fold_and_folds_are_equal(texts, count, order):
    different = len(set(texts))
    if different < count:
        with refused("bad-value", key="folds", wording=False):
            folds.split(texts, count)
        return
    numbers = folds.split(texts, count).tolist()
    of = dict(zip(texts, numbers, strict=True))
    assert [of[text] for text in texts] == numbers
    sizes = [sum(number == each for each in of.values()) for number in range(count)]
    assert max(sizes) - min(sizes) <= 1
    shuffled = order.sample(texts, len(texts))
    assert folds.split(shuffled, count).tolist() == [of[text] for text in shuffled]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_folds_as_there_are_not_are_refused(count):
    with refused("bad-value", key="folds", value=count):
        folds.split(["one", "two"], count)


def rows(texts):
    return Manifest(ids=[f"r{i}" for i in range(len(texts))], durations=[1.0] * len(texts),
                    wavs=[f"/r{i}.wav" for i in range(len(texts))], texts=texts)


def test_each_row_is_held_out_once_and_learnt_from_in_all_other_folds(tmp_path):
    draw = random.Random(0)
    train = rows([draw.choice(["one", "two", "three", "four", "five"]) for _ in range(40)])
    found = folds.write(train, rows(["dev"]), 3, tmp_path)
    held = [name for fold in found for name in fold.held_out.ids]
    assert sorted(held) == sorted(train.ids)
    for fold in found:
        lists = {path.stem: list(Manifest.read(path).ids) for path in (fold.run / "lists").iterdir()}
        assert lists["test"] == list(fold.held_out.ids) and lists["dev"] == ["r0"]
        assert sorted([*lists["train"], *lists["test"]]) == sorted(train.ids)


def test_other_labels_get_other_runs_and_the_same_ones_their_own_again(tmp_path):
    first, again, other = (folds.write(rows(texts), rows(["dev"]), 2, tmp_path)[0].run
                           for texts in (["a", "b"], ["a", "b"], ["a", "c"]))
    assert first == again != other


@pytest.mark.parametrize("text, said", [
    (TextRules(replace={"e": "ee", "ß": '"ß'}), ["--corpus.text", "{replace: {e: ee}}"]),
    (TextRules(replace={"e": "ee"}), ["--corpus.text.replace", "{e: ee}"]),
    (AsWritten(), ["--corpus.text", "!new:sbkit.data.text.AsWritten"])])
def test_a_fold_learns_the_very_labels_that_are_judged(tmp_path, monkeypatch, text, said):
    """A replacement that fits once more isn't made twice."""
    corpus = Corpus(str(run_folders.corpus(tmp_path / "data", train=6, dev=2, test=2)), "en", tmp_path / "m", text=text)
    found = corpus.prepare(show_progress=False)
    fold, commands = folds.write(found["train"], found["dev"], 2, tmp_path / "folds")[0], []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command) or SimpleNamespace(
        wait=lambda: 0, poll=lambda: 0, returncode=0))
    folds.train(fold, [str(Path(__file__).parents[2] / "hparams" / "ctc.yaml"), *said], corpus, 1)
    request = arguments.parse(commands[0][commands[0].index("train") + 1:])
    learnt = load.load(request.path, request.overrides)["corpus"].prepare(show_progress=False)
    assert list(learnt["test"].texts) == list(fold.held_out.texts)
    assert all(name in learnt["train"].texts for name in set(found["train"].texts) - set(fold.held_out.texts))
