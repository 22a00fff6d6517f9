"""Words of many texts are found, numbered and counted as if each text were split."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from speechbrain.utils.edit_distance import count_ops, op_table

from sbkit.score import texts
from sbkit.score.edits import count, count_words
from sbkit.score.texts import as_texts, as_tokens, word_count, words_of

# Some begin alike for eight letters and for sixteen, some end there.
WORDS = ["a", "ab", "abcdefgh", "abcdefghi", "bcdefghi", "abcdefghabcdefghi", "abcdefghabcdefghj", "ä", "家", "राममममम"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=6), st.sampled_from([3, texts._CHARACTERS]),
       st.sampled_from([40, texts._AT_ONCE]))
def test_texts_are_counted_by_words_however_many_are_numbered_together(pairs, characters, at_once):
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "_CHARACTERS", characters)
        patch.setattr(texts, "_AT_ONCE", at_once)
        found = count_words(*(as_texts([" ".join(words) for words in side]) for side in sides))
    for counts in (found, count(*sides)):
        expected = [count_ops(op_table(*pair)) for pair in pairs]
        assert [dict(zip(counts._fields, column, strict=True)) for column in zip(*counts, strict=True)] == [
            {kind: ops[kind] for kind in counts._fields} for ops in expected]


@given(st.lists(st.lists(st.sampled_from(["a", "abcdefghi", "ä", "", "new york", "x\u3000y"]), max_size=3), max_size=5))
@example([[""], ["new york"]])
def test_lists_of_words_become_texts_that_give_them_back_or_none(lists):
    joined = as_texts(lists)
    if joined is None:
        assert any(word.split() != [word] for words in lists for word in words)
    else:
        assert [text.split() for text in joined.to_pylist()] == lists
        assert words_of(joined).counts.tolist() == list(map(len, lists)) and word_count(joined) == sum(map(len, lists))


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from("ab  \t\n\x00\x1f\x85\xa0\u2003\u3000ä"), max_size=4), max_size=3))
def test_texts_keep_their_words_with_one_space_between(found):
    assert as_texts(found).to_pylist() == [" ".join(text.split()) for text in found]


def test_what_is_no_text_is_none():
    assert as_texts(["a", None]) is None and as_texts(["\ud800"]) is None and as_texts([["\ud800"]]) is None
    assert as_texts([[1, 2]]) is None and as_texts(["a", ["b", "c"]]).to_pylist() == ["a", "b c"]


def test_a_part_of_a_block_is_counted_alone():
    block = as_texts(["x y", "a b c", "a b c", ""])[1:]
    assert words_of(block).counts.tolist() == [3, 3, 0] and word_count(block) == 6
    references, hypotheses, longer = as_tokens(block[:2], block[1:])
    assert references[0] == hypotheses[0] and hypotheses[1] == "" and longer.tolist() == [0, -3]
