"""Lists of suspected labels: written and read back, and which rows of a corpus they leave out."""

import pytest
import run_folders
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Column
from sbkit.data.suspects import DECISIONS, DROP, KEEP, Exclusions, Suspect, write


def suspect(name, label, decision=DROP, corpus="/data/mine"):
    return Suspect(name, decision, "other words", 9.5, 0.01, label, "something else", "", "/a.wav", corpus)


@given(st.dictionaries(
    st.text("ab=-', \"\n", min_size=1), st.tuples(st.text("xyz ='\"\n,"), st.sampled_from(DECISIONS))))
def test_any_list_is_read_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("list") / "list.csv"
    write(path, [suspect(name, label, decision) for name, (label, decision) in rows.items()])
    found = Exclusions.read(path)
    assert found.labels == {name: label for name, (label, decision) in rows.items() if decision != KEEP}
    assert found.corpus == ("/data/mine" if rows else "")


@pytest.fixture
def listed(tmp_path):
    return Exclusions(tmp_path / "list.csv", "/data/mine", {"a": "one two", "b": "three"})


def test_rows_are_left_out_whatever_the_text_rules(listed):
    assert listed.mask(Column(["x", "b", "a"]), ["three", "Three!", "one, two"], "here").tolist() == [False, True, True]


def test_a_label_that_was_corrected_since_is_kept(listed):
    assert listed.mask(Column(["a", "b"]), ["one two", "three four"], "here").tolist() == [True, False]


@pytest.mark.parametrize("ids, texts", [(["x", "y"], ["one two", "three"]), (["a", "b"], ["other", "words"])])
def test_a_list_of_another_corpus_is_refused_by_name(listed, ids, texts):
    with refused("list-of-another-corpus"):
        listed.mask(Column(ids), texts, "here")


def test_a_row_that_the_corpus_does_not_have_is_named(listed):
    with refused("list-of-another-corpus"):
        listed.mask(Column(["a"]), ["one two"], "here")


@pytest.mark.parametrize("content, code", [
    ("ID,label\na,b\n", "missing-column"),
    ("ID,decision,label,corpus\na,perhaps,b,c\n", "malformed-row"),
    (f"ID,decision,label,corpus\na,{'b' * 5000},b,c\n", "malformed-row"),
])
def test_a_list_that_is_none_is_refused(tmp_path, content, code):
    (tmp_path / "list.csv").write_text(content)
    with refused(code):
        Exclusions.read(tmp_path / "list.csv")


@pytest.fixture
def corpus(tmp_path):
    """Three training rows, and two that are dev and test, of which the list says nothing."""
    for split, names in {"train": "abc", "dev": "d", "test": "e"}.items():
        rows = [f"{name},{run_folders.sound(tmp_path / f'{name}.wav', seed=ord(name))},said {name}" for name in names]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.csv").write_text("\n".join(["ID,wav,wrd", *rows]) + "\n")
    return lambda **options: Corpus(str(tmp_path / "data"), folder=tmp_path / "manifests", **options)


def test_a_corpus_counts_and_names_what_a_list_leaves_out(corpus, tmp_path):
    path = tmp_path / "list.csv"
    write(path, [suspect("b", "said b"), suspect("c", "said c", KEEP)])
    made = corpus(exclude=path)
    assert list(made.prepare()["train"].ids) == ["a", "c"]
    entry = made.report["splits"]["train"]
    assert (entry["rows"], entry["kept"], entry["left_out"]["excluded"]["count"]) == (3, 2, 1)
    assert "excluded" in (tmp_path / "manifests" / "left_out.csv").read_text()


def test_a_list_that_has_changed_is_read_again(corpus, tmp_path):
    path = tmp_path / "list.csv"
    assert len(corpus().prepare()["train"]) == 3
    for names in ("b", "ab"):
        write(path, [suspect(name, f"said {name}") for name in names])
        assert len(corpus(exclude=path).prepare()["train"]) == 3 - len(names)


def test_a_list_that_is_missing_is_an_error_before_anything_is_read(corpus, tmp_path):
    with refused("no-such-path"):
        corpus(exclude=tmp_path / "none.csv").check_exists()
