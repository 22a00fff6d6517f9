"""Our three splits are found under a source's own names for them, and are written down in one place."""

import ast
from pathlib import Path

import pytest
import run_folders
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import sbkit
from sbkit.data.corpus import Corpus
from sbkit.data.sources import Rows
from sbkit.data.splits import ALIASES, SPLITS, assign_splits, choose_splits, hold_out


class Named:
    """A source of which only the names of its splits matter."""

    where, kind = "here", "a test"

    def __init__(self, *names):
        self._names = list(names)

    def names(self):
        return self._names


@pytest.mark.parametrize("split, alias", [(split, alias) for split in SPLITS for alias in ALIASES[split]])
def test_a_split_is_found_under_each_alias_whatever_its_case(split, alias):
    assert choose_splits(Named("other", alias.title()), SPLITS, {}) == {split: [alias.title()]}


def test_nemos_manifests_are_splits_and_plain_names_go_before():
    source = Named("train_manifest", "Valid_Manifest", "test", "test_manifest")
    assert choose_splits(source, SPLITS, {}) == {
        "train": ["train_manifest"], "dev": ["Valid_Manifest"], "test": ["test"]}


def test_what_the_corpus_names_goes_before_aliases():
    source = Named("train", "validated", "dev", "test")
    assert choose_splits(source, ("train", "dev"), {"train": ["validated", "train"]}) == {
        "train": ["validated", "train"], "dev": ["dev"]}


@pytest.mark.parametrize("names, wanted, named", [
    (["train"], SPLITS, {"dev": ["valid"]}), (["other"], SPLITS, {}), ([], ("test",), {})])
def test_a_source_without_them_is_refused(names, wanted, named):
    with refused("missing-split"):
        choose_splits(Named(*names), wanted, named)


@pytest.mark.slow
def test_they_are_defined_once():
    home = Path(sbkit.__file__).parent
    found = [str(path.relative_to(home)) for path in sorted(home.rglob("*.py"))
             for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             if isinstance(node, (ast.Tuple, ast.List))
             and [getattr(each, "value", None) for each in node.elts] == [*SPLITS]]
    assert found == ["data/splits.py"]


def test_keys_keep_their_split_when_others_are_added():
    before, after = (assign_splits((f"LJ-{i}" for i in range(count)), 8) for count in (300, 310))
    counts = {split: list(before.values()).count(split) for split in SPLITS}
    assert counts == {"train": 284, "dev": 8, "test": 8}
    assert sum(after[name] != split for name, split in before.items()) <= 2
    assert list(assign_splits(map(str, range(1000)), 8).values()).count("dev") == 20
    assert list(assign_splits(map(str, range(1000)), 100).values()).count("dev") == 100
    assert sorted(assign_splits("abc", 8).values()) == ["dev", "test", "train"], "the smallest corpus has one of each"


@given(st.integers(3, 400), st.integers(1, 200), st.randoms())
def test_a_divided_list_has_all_rows_once_and_no_sentence_in_two_splits(count, sentences, random):
    texts = ["" if said == 1 else f"Said {said}." for said in (random.randrange(sentences) for _ in range(count))]
    rows = Rows("a list", [str(i) for i in range(count)], ["x.wav"] * count, texts, malformed=[("y", "z")])
    found = hold_out(rows)
    assert sorted(int(each) for part in found.values() for each in part.ids) == list(range(count))
    assert all(texts[int(i)] == text for part in found.values() for i, text in zip(part.ids, part.texts, strict=True))
    assert all(len(found[split]) for split in SPLITS)
    assert [len(found[split].malformed) for split in SPLITS] == [1, 0, 0]
    if len(set(texts)) >= 100:
        said = [set(found[split].texts) - {""} for split in SPLITS]  # rows in which nobody speaks aren't one sentence
        assert not (said[0] & said[1] or said[0] & said[2] or said[1] & said[2])


def test_commands_are_divided_by_recording_and_two_rows_not_at_all():
    digits = Rows("digits", [f"{i}" for i in range(100)], ["x.wav"] * 100, [str(i % 10) for i in range(100)])
    found = hold_out(digits)
    assert {split: len(found[split]) for split in SPLITS} == {"train": 80, "dev": 10, "test": 10}
    assert set(found["train"].texts) == set(digits.texts)
    with refused("too-few-rows"):
        hold_out(Rows("two", ["a", "b"], ["x.wav"] * 2, ["yes", "no"]))


@pytest.mark.parametrize("alone", [True, False])
def test_one_list_is_enough_to_train_on(tmp_path, alone):
    run_folders.corpus(tmp_path, train=30)
    corpus = Corpus(tmp_path / "train.csv" if alone else tmp_path, folder=tmp_path / "m")
    assert list(corpus.prepare(show_progress=False)) == ["train"], "nothing is held out that nobody needs"
    found = corpus.prepare(show_progress=False, needed=SPLITS)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 24, "dev": 3, "test": 3}
    assert "dev and test were split off the only list" in corpus.summary()
    again = corpus.prepare(show_progress=False, needed=SPLITS)
    assert all(again[split].ids == found[split].ids for split in SPLITS)


@pytest.mark.parametrize("options", [{"only": ("train",)}, {"splits": {"train": ["train", "other"]}}])
def test_a_choice_of_lists_is_not_divided(tmp_path, options):
    run_folders.corpus(tmp_path, train=5, other=5)
    with refused("missing-split"):
        Corpus(tmp_path, folder=tmp_path / "m", **options).prepare(show_progress=False, needed=SPLITS)
