"""Words of many texts are found, numbered and counted as if each text were split."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from speechbrain.utils.edit_distance import count_ops, op_table

from sbkit.score import bits, edits, texts
from sbkit.score.edits import count, count_words
from sbkit.score.texts import spaced, words_of_lists, words_of_texts

# Some begin alike for eight letters and for sixteen, some end there.
WORDS = ["a", "ab", "abcdefgh", "abcdefghi", "bcdefghi", "abcdefghabcdefghi", "abcdefghabcdefghj", "ä", "家", "राममममम"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=9)


def check(counts, pairs):
    expected = [count_ops(op_table(*pair)) for pair in pairs]
    assert [dict(zip(counts._fields, column, strict=True)) for column in zip(*counts, strict=True)] == [
        {kind: ops[kind] for kind in counts._fields} for ops in expected]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=6), st.sampled_from([(2, 1, 1, 3), (2, 30, 14, 63)]))
def test_texts_are_counted_by_words_however_many_at_once(pairs, limits):
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    with pytest.MonkeyPatch.context() as patch:
        for limit, value in zip(((edits, "_AT_ONCE"), (bits, "_CELLS"), (texts, "_TABLE"), (edits, "MOST")), limits,
                                strict=True):
            patch.setattr(*limit, value)
        check(count_words(*([" ".join(words) for words in side] for side in sides)), pairs)
        check(count_words(*sides), pairs)
    check(count(*sides), pairs)


def test_sequences_that_fill_an_integer_and_longer_ones_are_counted():
    rng = random.Random(7)
    sizes = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 62, 63]
    pairs = [[rng.choices("abc", k=size) for size in (rows, columns)] for rows in sizes for columns in sizes]
    longer = [[rng.choices("abc", k=64), rng.choices("abc", k=60)], [["a"], ["a"] * 70]]
    for some in (pairs, pairs[:20] + longer):
        check(count_words(*zip(*some, strict=True)), some)


@given(st.lists(st.lists(st.sampled_from(["a", "abcdefghi", "ä", "", "new york", "x\u3000y", "b\nc", "\ud800"]),
                         max_size=3), min_size=1, max_size=5))
@example([[""], ["new york"]])
@example([[""], []])
def test_words_of_lists_have_equal_numbers_where_they_are_equal(lists):
    words = words_of_lists(lists)
    if words is None:
        assert {"new york", "b\nc"} & {word for words in lists for word in words}
    else:
        found = [words.numbers[begin:begin + many].tolist()
                 for begin, many in zip(words.begins, words.counts, strict=True)]
        names = {number: word for numbers, each in zip(found, lists, strict=True)
                 for number, word in zip(numbers, each, strict=True)}
        assert [[names[number] for number in numbers] for numbers in found] == lists
        assert len(set(names.values())) == len(names)


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from("ab  \t\n\x00\x1f\x85\xa0\u2003\u3000ä\ud800"), max_size=4), max_size=3))
def test_texts_keep_their_words_with_one_space_between(found):
    expected = [text.split() for text in found]
    one = spaced(found)
    assert list(one.texts) == list(map(" ".join, expected)) and one.words == sum(map(len, expected))
    if found:
        assert words_of_texts(one.texts).counts.tolist() == list(map(len, expected))


def test_what_is_no_text_is_no_words():
    assert words_of_lists([["a"], [1, 2]]) is None
    with pytest.raises(TypeError):
        spaced(["a", None])
    assert count_words([[1, 2]], [[1, 3]]).substitutions.tolist() == [1]
