"""Words of many texts are found, numbered and counted as if each text were split."""

from __future__ import annotations

import platform
import random
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from speechbrain.utils.edit_distance import count_ops, op_table

from sbkit.score import bits, edits, texts
from sbkit.score.edits import count, count_words
from sbkit.score.texts import as_texts, words_of

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
        check(count_words(*(as_texts(side).texts for side in sides)), pairs)
    check(count(*sides), pairs)


@pytest.mark.parametrize("by_table", [False, True], ids=["numpy's own count of bits", "numpy 1.26"])
def test_sequences_that_fill_an_integer_and_longer_ones_are_counted(monkeypatch, by_table):
    if by_table:
        monkeypatch.setattr(bits, "_ones", bits._ones_by_table)
    rng = random.Random(7)
    sizes = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 62, 63]
    pairs = [[rng.choices("abc", k=size) for size in (rows, columns)] for rows in sizes for columns in sizes]
    longer = [[rng.choices("abc", k=64), rng.choices("abc", k=60)], [["a"], ["a"] * 70]]
    for some in (pairs, pairs[:20] + longer):
        check(count_words(*(as_texts(side).texts for side in zip(*some, strict=True))), some)


@given(st.lists(st.lists(st.sampled_from(
    ["a", "abcdefghi", "ä", "", "new york", "x\u3000y", "b\nc", "\u200d", "\ud800"]), max_size=3), max_size=5),
    st.sampled_from([2, 200]))
@example([[""], ["new york"]], 2)
def test_lists_of_words_become_texts_that_give_them_back_or_none(lists, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "_LISTS", at_once)
        joined = as_texts(lists)
    if joined is None:
        assert any(word.split() != [word] for words in lists for word in words)
    else:
        assert [text.split() for text in joined.texts] == lists and joined.words == sum(map(len, lists))


@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_words_have_equal_numbers_where_they_are_equal(lists):
    words = words_of([" ".join(each) for each in lists])
    assert words.counts.tolist() == list(map(len, lists))
    pairs = {(word, number) for each, begin in zip(lists, words.begins.tolist(), strict=True)
             for word, number in zip(each, words.numbers[begin:].tolist(), strict=False)}
    assert len(pairs) == len({word for word, _ in pairs}) == len({number for _, number in pairs})


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from("ab  \t\n\x00\x1f\x85\xa0\u2003\u3000ä\ud800"), max_size=4), max_size=3))
def test_texts_keep_their_words_with_one_space_between(found):
    expected = [text.split() for text in found]
    one = as_texts(found)
    if one is None:
        assert any("\0" in text for text in found)
        return
    assert list(one.texts) == list(map(" ".join, expected)) and one.words == sum(map(len, expected))
    if found:
        assert words_of(one.texts).counts.tolist() == list(map(len, expected))


def test_what_is_no_text_is_none():
    assert as_texts(["a", None]) is None and as_texts([["a"], [1, 2]]) is None
    assert as_texts(["a", ["b", "c"]]).texts == ["a", "b c"]


COUNTING = """
import resource
from sbkit.score.edits import count_words
sides = [[f"{word} {i} said a word or two and said them again" for i in range(5000)] for word in ("he", "she")]
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    count_words(*sides)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is freed is another library's business")
def test_many_texts_are_counted_in_memory_that_is_there():
    found = subprocess.run([sys.executable, "-c", COUNTING], capture_output=True, text=True, check=True)
    pages = list(map(int, found.stdout.split()))
    assert pages[0] > 500 and max(pages[2:]) < 100, "pages that the kernel gave anew in each call"
