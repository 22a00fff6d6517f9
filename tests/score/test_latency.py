"""Words of a live transcript: since when each stands, which ones changed, and how late they were."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbkit.score.latency import LiveRates, LiveTranscript, live_transcript, match_words, rates, stable_words

WORDS = st.sampled_from(["a", "at", "attic", "an", "odd", "room"])
TEXTS = st.lists(WORDS, max_size=5)


def test_a_word_that_goes_on_has_not_changed_and_stands_once_it_is_whole():
    texts = [["the"], ["the", "at"], ["the", "attic"], ["the", "attic", "is"]]
    assert stable_words(texts) == ([0, 2, 3], 0)


def test_a_word_that_is_replaced_or_taken_back_has_changed():
    assert stable_words([["a", "cat"], ["a", "bat"]]) == ([0, 1], 1)
    assert stable_words([["a", "cat"], ["a"]]) == ([0], 1)
    assert stable_words([["a", "cat"], ["a"], ["a", "cat"]]) == ([0, 2], 1)


def test_a_word_is_the_same_wherever_it_moves():
    assert match_words(["of", "green", "river"], ["off", "a", "green", "river"]) == ([None, None, 1, 2], 0)
    assert stable_words([["ab", "green"], ["x", "b", "green"]]) == ([1, 1, 0], 1)


def grown(text):
    """All texts that a display of whole words, which never takes one back, may have live_transcript."""
    return st.lists(st.integers(0, len(text)), max_size=6).map(
        lambda cuts: [*(text[:cut] for cut in sorted(cuts)), text])


@given(TEXTS.flatmap(grown))
def test_what_only_grows_never_changes_and_each_word_stands_since_it_appeared(texts):
    since, changed = stable_words(texts)
    assert changed == 0
    assert since == [next(n for n, text in enumerate(texts) if len(text) > i) for i in range(len(texts[-1]))]


@given(st.text("ab ", max_size=12).flatmap(grown))
@example(["a a", "a aa a"])
def test_letters_that_only_grow_never_change_a_word(texts):
    since, changed = stable_words([text.split() for text in texts])
    final = texts[-1].split()
    assert changed == 0
    for i, number in enumerate(since):
        assert all(text.split()[i] == final[i] for text in texts[number:])
        assert number == 0 or texts[number - 1].split()[i:i + 1] != [final[i]]


@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_a_word_stands_in_all_texts_since_the_one_it_is_said_to(texts):
    since, changed = stable_words(texts)
    assert len(since) == len(texts[-1])
    for word, number in zip(texts[-1], since, strict=True):
        assert all(word in text for text in texts[number:])
    assert 0 <= changed <= sum(map(len, texts[:-1]))
    assert stable_words([*texts, texts[-1]]) == (since, changed), "the same once more is no change"


@given(TEXTS, TEXTS)
def test_each_word_before_is_kept_goes_on_or_has_changed(before, after):
    same, changed = match_words(before, after)
    kept = [old for old in same if old is not None]
    assert kept == sorted(set(kept)) and len(same) == len(after)
    assert all(after[new] == before[old] for new, old in enumerate(same) if old is not None)
    assert 0 <= changed <= len(before) - len(kept)
    if not any(new.startswith(old) for old in before for new in after if new != old):
        assert changed == len(before) - len(kept)


def test_latency_is_of_right_words_and_from_their_ends():
    texts, times = ["the", "the od", "the odd rum", "the odd room"], [0.64, 1.28, 1.92, 2.1]
    seen = live_transcript(texts, times, ["the", "old", "odd", "room"], [0.5, 1.0, 1.25, 2.0])
    assert seen == LiveTranscript("the odd room", 1, pytest.approx((0.14, 0.67, 0.1)))


def test_without_the_ends_of_words_nothing_is_measured():
    assert live_transcript(["a", "b"], [1.0, 2.0], ["b"], None) == LiveTranscript("b", 1, ())


@given(st.lists(WORDS, min_size=1, max_size=6), st.lists(st.floats(0.1, 2.0), min_size=6, max_size=6),
       st.floats(0.0, 5.0))
def test_what_is_shown_later_is_late_by_as_much(words, steps, later):
    times = [sum(steps[:n + 1]) for n in range(len(words))]
    texts = [" ".join(words[:n + 1]) for n in range(len(words))]
    early = live_transcript(texts, times, words, times)
    late = live_transcript(texts, [time + later for time in times], words, times)
    assert early.latencies == pytest.approx([0.0] * len(words))
    assert late.latencies == pytest.approx([later] * len(words))


def test_the_rates_of_a_test():
    said = [("one", "a b c d"), ("two", "e")]
    seen = [LiveTranscript("a b c x", 3, (0.1, 0.2, 0.3)), LiveTranscript("e", 0, (1.0,))]
    found = rates(640, said, seen)
    assert (found.WER, found.latency, found.measured, found.changed) == (20.0, pytest.approx(0.4), 4, 60.0)
    assert found.latency_p95 == pytest.approx(0.3 + 0.85 * 0.7), "between the last two of four"
    assert found.WER_interval[0] <= 20 <= found.WER_interval[1] and found.facts()["chunk"] == 640
    assert found.row()[0] == "640 ms"


def test_where_no_word_was_right_there_is_no_latency():
    found = rates(None, [("one", "a")], [LiveTranscript("", 0, ())])
    assert isinstance(found, LiveRates) and found.latency is None and found.latency_p95 is None
    assert found.facts()["chunk"] == found.row()[0] == "whole" and found.changed == 0.0
