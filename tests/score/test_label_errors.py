"""Which labels are probably wrong: by the records of words and by the sound, with a reason and an expected share."""

import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sbkit.data.manifest import Manifest
from sbkit.data.suspects import DROP
from sbkit.score.label_errors import (
    UNSEEN,
    LabelScore,
    expected_right,
    judge,
    require_trained,
    summary,
    suspects,
    units,
)
from sbkit.score.report import suspect_page

WORDS = "brave teacher finds old ladder near green river after dinner while seven quiet horses sleep".split()


def said(count=400, seed=0):
    draw = random.Random(seed)
    return [draw.choices(WORDS, k=draw.randint(4, 8)) for _ in range(count)]


def scores(rows, margin=50.0, confidence=0.9):
    """A score for each (label, hypothesis)."""
    return [LabelScore(f"row{i}", label, hypothesis, margin, confidence) for i, (label, hypothesis) in enumerate(rows)]


def corpus(**wrong):
    """The given rows, and right labels of which each twentieth word is recognised as one that no label has."""
    draw = random.Random(1)
    rows = [(" ".join(words), " ".join(word + "x" if draw.random() < 0.05 else word for word in words))
            for words in said()]
    return scores([*wrong.values(), *rows])


@pytest.mark.parametrize("label, hypothesis, reason", [
    ("seven quiet horses sleep near green river", "brave teacher finds old ladder after dinner", "other words"),
    ("near green river", "seven quiet horses sleep near green river", "more speech"),
    ("seven old horses", "seven teacher finds after dinner while horses", "more speech"),
    ("seven quiet horses sleep near green river", "seven quiet", "cut off"),
    ("seven quiet horses sleep", "", "silence"),
    ("sevem quiet horsef slaep near grern river", "seven quiet horses sleep near green river", "other letters"),
])
def test_a_wrong_label_is_named_with_its_reason(label, hypothesis, reason):
    found = judge(corpus(wrong=(label, hypothesis)))
    assert found[0].reason == reason and found[0].expected_right < 0.1
    assert max(each.score for each in found[1:]) < found[0].score


def test_a_model_that_recognises_almost_nothing_is_another_reason():
    rows = corpus(wrong=("seven quiet horses sleep near green river", "brave teacher finds old ladder after dinner"))
    assert judge([rows[0]._replace(confidence=0.2), *rows[1:]])[0].reason == "nothing fits"


def test_single_wrong_words_are_named_where_a_model_rarely_errs_so_and_none_where_no_label_is_wrong():
    draw = random.Random(2)
    rows = [(" ".join(words), " ".join(word + "x" if draw.random() < 0.05 else word for word in words))
            for words in said(800, seed=3)]
    wrong = set(draw.sample(range(800), 100))
    for i in wrong:
        words, heard = (each.split() for each in rows[i])
        at = draw.randrange(len(words))
        words[at] = draw.choice([word for word in WORDS if word != words[at]])
        rows[i] = " ".join(words), " ".join(heard)
    rows = scores(rows)
    found = [row for row in suspects(rows, manifest(rows), "x") if row.decision == DROP]
    named = {int(row.ID.removeprefix("row")) for row in found}
    assert {row.reason for row in found} == {"one word"}
    assert len(named & wrong) >= 80 and len(named - wrong) <= 0.2 * len(named)
    assert all(found[i].score >= found[i + 1].score for i in range(len(found) - 1))
    right = re.search(r"at most (\d+)% of these", summary(found, rows, len(rows)))[1]
    assert len(named - wrong) / len(named) <= int(right) / 100 <= 0.25
    unsure = [row._replace(margin=6.0) for row in rows]
    assert not [row for row in suspects(unsure, manifest(rows), "x") if row.decision == DROP]
    assert not suspects(corpus(), manifest(corpus()), "x")


def test_words_often_inserted_and_audio_that_shows_nothing_are_no_evidence():
    made_up, as_likely, *_ = corpus(a=("seven quiet horses sleep", "sevenx quietx horsesx sleepx"),
                                    b=("seven quiet horses sleep near green", "brave teacher finds old ladder after"))
    found = judge([made_up, as_likely._replace(margin=-1.0), *corpus()])
    assert found[0].score == found[1].score == 0


@given(st.lists(st.floats(0, 50), min_size=1, max_size=50))
def test_the_expected_share_falls_with_the_score_and_is_a_share(values):
    found = expected_right(np.array(values))
    order = np.argsort(values)
    assert ((found >= 0) & (found <= 1)).all() and (np.diff(found[order]) <= 1e-12).all()
    assert found[order[-1]] <= min(1, len(values) * np.exp(-max(values))) + 1e-12


@given(st.lists(st.tuples(st.text("ab ", max_size=12), st.text("ab ", max_size=12), st.floats(-5, 200)), max_size=20))
def test_any_rows_are_judged(rows):
    found = judge([LabelScore(str(i), *row, 0.5) for i, row in enumerate(rows)])
    assert len(found) == len(rows)
    for (label, hypothesis, margin), verdict in zip(rows, found, strict=True):
        assert 0 <= verdict.score <= max(0, margin) + 1e-9
        assert verdict.score == 0 or label.split() != hypothesis.split()


def test_a_script_without_spaces_is_compared_by_characters():
    assert units(["你好吗", "我很好"]) == "character" and units(["how are you", "fine"]) == "word"
    draw = random.Random(0)
    labels = ["".join(draw.choices("你好吗我很他们在家里", k=8)) for _ in range(300)]
    assert judge(scores([("你好吗我很", "他们在家里"), *zip(labels, labels, strict=True)]))[0].expected_right < 0.1


def manifest(found):
    return Manifest(ids=[each.id for each in found], durations=[1.0] * len(found),
                    wavs=[f"/{each.id}.wav" for each in found], texts=[each.label for each in found])


def test_the_list_begins_with_the_worst_and_says_what_is_expected_of_it():
    rows = corpus(mild=("seven quiet horses", "seven quiet horses sleep near"),
                  bad=("seven quiet horses sleep near green river", "brave teacher finds old ladder after dinner"))
    found = suspects(rows, manifest(rows), "/data/mine")
    assert [each.ID for each in found[:2]] == ["row1", "row0"] and found[0].decision == DROP
    assert (found[0].wav, found[0].corpus) == ("/row1.wav", "/data/mine")
    text = summary(found, rows, len(rows) + 3)
    assert "are probably wrong; at most" in text and "3 rows could not be read" in text
    assert re.search(r"more speech +1\n", text)


def test_the_page_says_what_the_list_lacks(tmp_path):
    rows = corpus(bad=("seven quiet horses sleep near green river", "brave teacher finds old ladder after dinner"))
    suspect_page.write(tmp_path / "page.html", suspects(rows, manifest(rows), "x"), manifest(rows), [])
    assert UNSEEN in (tmp_path / "page.html").read_text() and "single wrong words" in UNSEEN


def test_models_that_have_learnt_nothing_are_distinguished_from_labels_that_are_right():
    rows = corpus(wrong=("seven quiet horses sleep near green river", "brave teacher finds old ladder after dinner"))
    assert len(suspects(rows, manifest(rows), "x")) == 1
    rows += [row._replace(id=f"empty{i}", hypothesis="") for i, row in enumerate(2 * rows)]
    assert judge(rows)[0].expected_right < 0.1
    half = summary([], rows[:900], 900)
    assert "the models recognise " in half and "so most misspelt labels are not listed" in half
    with refused("model-too-weak"):
        require_trained(rows)
    rows = scores([(" ".join(words), " ".join(words)) for words in said()])
    assert summary(suspects(rows, manifest(rows), "x"), rows, len(rows)) == "none of 400 labels is probably wrong"
