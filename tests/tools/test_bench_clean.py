"""Wrong labels that the bench plants: as many as asked for, of each kind, and nothing else changes."""

import collections
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tools.bench.clean import KINDS, by_lot, cut, misspelt, plant

SENTENCE = st.lists(st.text("abcd", min_size=1, max_size=8), min_size=2, max_size=9).map(" ".join)


@settings(max_examples=25)
@given(st.lists(SENTENCE, min_size=60, max_size=90, unique=True), st.sampled_from([5, 10, 20]), st.integers(0, 9))
def test_a_share_of_the_labels_is_made_wrong_in_equal_parts(texts, level, seed):
    rows = [(f"row{i}", text) for i, text in enumerate(texts)]
    found = plant(rows, level / 100, seed)
    kinds = collections.Counter(row.kind for row in found)
    wrong = round(level / 100 * len(rows))
    assert sum(kinds[kind] for kind in KINDS) == wrong and all(wrong // 3 <= kinds[kind] for kind in KINDS)
    assert kinds["one word"] == wrong
    for (_, text), row in zip(rows, found, strict=True):
        if row.kind == "one word":
            assert sum(a != b for a, b in zip(text.split(), row.text.split(), strict=True)) == 1
    assert [(row.id, row.text) for row in found if not row.kind] == [
        each for each, row in zip(rows, found, strict=True) if not row.kind]
    swapped = [(text, row.text) for (_, text), row in zip(rows, found, strict=True) if row.kind == "swapped"]
    assert sorted(text for text, _ in swapped) == sorted(label for _, label in swapped)
    assert len(swapped) == 1 or all(text != label for text, label in swapped)


@settings(max_examples=20)
@given(st.integers(0, 99))
def test_what_is_left_out_by_lot_is_not_what_was_planted(seed):
    wrong = {row.id for row in plant([(str(i), "some more words") for i in range(1000)], 0.1, seed)
             if row.kind in KINDS}
    drawn = by_lot(1000, 100, seed)
    assert len(set(drawn)) == 100 and sum(str(i) in wrong for i in drawn) < 30


@given(SENTENCE, st.integers())
def test_a_cut_label_lacks_words_at_one_end(text, seed):
    found = cut(text, random.Random(seed))
    assert found != text and (text.startswith(found) or text.endswith(found))


@given(SENTENCE, st.integers())
def test_a_misspelt_label_has_a_letter_of_each_third_word_changed(text, seed):
    found = misspelt(text, random.Random(seed))
    changed = sum(a != b for a, b in zip(text, found, strict=True))
    assert changed == max(1, round(len(text.split()) / 3))
