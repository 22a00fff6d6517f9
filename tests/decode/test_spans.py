"""Tokens become words with the right text, times and confidences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.decode.greedy import greedy
from sbkit.decode.spans import Spelling, TokenSpans, best_path, collapse


def spans(*tokens):
    """From (id, start, end, confidence)."""
    ids, starts, ends, confidence = (np.array(column) for column in zip(*tokens, strict=True))
    return TokenSpans(ids, starts, ends, confidence)


def texts(pieces, silent=(), separator="▁"):
    found = spans(*((i, 2 * i, 2 * i + 1, 0.9) for i in range(len(pieces))))
    return [word.text for word in Spelling(pieces, 0.04, silent, separator).words(found)]


def test_pieces_join_to_words_with_times_and_the_least_confidence():
    pieces = ["▁the", "▁c", "at", "s"]
    found = spans((0, 0, 2, 0.9), (1, 5, 6, 0.8), (2, 7, 9, 0.4), (3, 9, 10, 0.7))
    the, cats = Spelling(pieces, 0.04, ()).words(found, start=0.7)
    assert (the.text, the.start, the.end) == ("the", 0.7, 0.78)
    assert (cats.text, cats.start, cats.end) == ("cats", 0.9, 1.1)
    assert cats.confidence == 0.4


def test_a_calibrated_confidence_is_read_off_the_curve():
    found = spans((0, 0, 2, 0.9), (1, 5, 6, 0.8), (2, 7, 9, 0.4), (3, 9, 10, 0.1))
    words = Spelling(["▁a", "▁b", "c", "▁d"], 0.04, (), reliability=[[0.2, 0.1], [0.6, 0.3], [0.9, 0.95]]).words(found)
    np.testing.assert_allclose([word.confidence for word in words], [0.95, 0.2, 0.1])


@pytest.mark.parametrize("pieces, expected", [
    (["▁", "a", "b", "▁", "c"], ["ab", "c"]),  # characters: the space is a token of its own
    (["a", "b", "▁c"], ["ab", "c"]),  # a first word without its mark
    (["▁", "▁", "a"], ["a"]),  # no empty words
    (["▁a▁b", "c"], ["a", "bc"]),  # a piece that spans words
    (["▁gr", "<0xC3>", "<0xB6>", "n"], ["grön"]),  # bytes of a character without a piece
    (["▁x", "<0xC3>", "▁y"], ["x\ufffd", "y"]),  # half a character
])
def test_every_kind_of_piece(pieces, expected):
    assert texts(pieces) == expected


def test_ids_without_text_are_skipped_and_every_token_can_be_a_word():
    assert texts(["<s>", "▁hi", "</s>"], silent={0, 2}) == ["hi"]
    assert texts(["▁", "老", "农"], separator=None) == ["老", "农"]


def test_a_separate_space_does_not_lengthen_the_word():
    found = spans((0, 0, 3, 0.9), (1, 5, 6, 0.8))
    (word,) = Spelling(["▁", "a"], 1.0, ()).words(found)
    assert (word.start, word.end, word.confidence) == (5.0, 6.0, 0.8)


def test_a_pause_ends_a_word_whatever_the_next_token_is():
    pieces = ["<s>", "▁a", "b", "c", "▁", "d"]
    found = spans((1, 0, 1, 0.9), (2, 4, 5, 0.9), (0, 6, 7, 0.9), (3, 9, 10, 0.9), (4, 15, 16, 0.9), (5, 22, 23, 0.9))

    def text(seconds):
        spelling = Spelling(pieces, 1.0, pause_seconds=seconds)
        assert spelling.text(found) == " ".join(word.text for word in spelling.words(found))
        return spelling.text(found)

    assert text(math.inf) == text(5) == "abc d", "no empty word where a pause and a mark meet"
    assert text(4) == "ab c d" and text(3) == "a b c d"


@pytest.mark.parametrize("frames, expected", [(17, "ab"), (18, "a b")])
def test_a_pause_takes_seven_tenths_of_a_second(frames, expected):
    found = spans((0, 0, 2, 0.9), (1, 2 + frames, 3 + frames, 0.9))
    assert Spelling(["▁a", "b"], 0.04, ()).text(found) == expected
    assert Spelling(["▁a", "b"], 0.04, (), separator=None).text(found) == "ab"


def test_a_character_of_several_bytes_is_one_word_of_a_script_without_spaces():
    assert texts(["▁", "<0xE4>", "<0xBD>", "<0xA0>", "好"], separator=None) == ["你", "好"]


def test_collapse_handles_no_frames_and_no_utterances():
    assert [len(found) for found in collapse(np.zeros((2, 0), dtype=np.int64), np.zeros((2, 0)))] == [0, 0]
    assert collapse(np.zeros((0, 5), dtype=np.int64), np.zeros((0, 5))) == []


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(2, 7), st.integers(0, 10_000))
def test_the_same_as_torch(batch, frames, labels, seed):
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.standard_normal((batch, frames, labels)).astype(np.float32)).log_softmax(-1)
    lengths = rng.integers(0, frames + 1, batch)
    theirs = greedy(scores, torch.from_numpy(lengths))
    ours = collapse(*best_path(scores.numpy(), lengths))
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.ids, expected.ids)
        np.testing.assert_array_equal(mine.starts, expected.starts)
        np.testing.assert_array_equal(mine.ends, expected.ends)
        np.testing.assert_allclose(mine.confidence, expected.confidence, rtol=1e-5)


def test_not_a_number_is_refused_within_an_utterance_and_not_beyond():
    scores = np.log(np.full((2, 3, 2), 0.5, dtype=np.float32))
    scores[1, 2] = np.nan
    assert best_path(scores, np.array([3, 2]))[0].shape == (2, 3)
    with refused("nan-output"):
        best_path(scores, np.array([3, 3]))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="shapes"):
        best_path(np.zeros((2, 3)), np.array([1, 2]))
    labels, confidence = best_path(np.zeros((2, 0, 4), np.float32), np.array([0, 0]))
    assert labels.shape == confidence.shape == (2, 0)
