"""How long each character lasts: texts are spelled with the fewest pieces, and durations add up to the frames."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.decode.durations import Alignment, durations, speech, spell

RATE = 16_000
PIECES = ["<blk>", "▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "a"]


@functools.cache
def fewest(written, pieces):
    """The number of pieces by trying all; None if there is no way."""
    if not written:
        return 0
    found = [1 + rest for piece in pieces if piece and written.startswith(piece)
             and (rest := fewest(written[len(piece):], pieces)) is not None]
    return min(found, default=None)


@settings(max_examples=150, deadline=None)
@given(text=st.text("abc ", max_size=9), pieces=st.lists(st.text("▁abc", min_size=1, max_size=3), max_size=8),
       separator=st.sampled_from(["▁", None]))
def test_a_text_is_spelled_with_as_few_pieces_as_any_way_has(text, pieces, separator):
    pieces = ["<blk>", *pieces]
    written = text if separator is None else separator + text.replace(" ", separator)
    least = fewest(written, tuple(pieces))
    if least is None:
        with refused("unspellable-word"):
            spell(text, pieces, separator)
        return
    ids = spell(text, pieces, separator)
    assert len(ids) == least and "".join(pieces[number] for number in ids) == written


def test_a_long_text_takes_no_longer_than_its_length():
    text = "abc" * 2000
    assert len(spell(text, PIECES)) == 2000 + 1


def test_a_piece_that_is_there_twice_is_the_first():
    assert spell("a", ["<blk>", "x", "a", "a"], None) == [2]


@pytest.mark.parametrize("text", ["añbé", "ca"])
def test_what_cannot_be_spelled_is_named(text):
    pieces = ["<blk>", "▁", "a", "b"] if "ñ" in text else ["<blk>", "▁", "a", "bc"]
    with refused("unspellable-word") as error:
        spell(text, pieces)
    assert "alphabet" in error.value.hint


def tone(*parts):
    """A recording of (loudness, seconds)."""
    return np.concatenate([level * np.sin(0.3 * np.arange(round(seconds * RATE))) for level, seconds in parts])


def aligned(pieces, starts, ends, separator="▁"):
    return Alignment(pieces, np.array(starts, float), np.array(ends, float), separator)


def test_each_character_ends_in_the_middle_between_of_its_end_and_the_next_ones_start():
    signal = tone((0, 0.2), (0.5, 0.6), (0, 0.2))
    alignment = aligned(["▁", "a", "b", "c"], [0.2, 0.24, 0.40, 0.6], [0.24, 0.3, 0.5, 0.7])
    found = durations("abc", alignment, signal, RATE, 50)
    # 50 frames a second: silence to 0.2, a to 0.35, b to 0.55, c to where the sound ends at 0.8, silence to 1
    assert found.tolist() == [10, 8, 10, 12, 10] and found.dtype == np.int64


def test_characters_of_one_piece_share_its_time_and_the_space_before_the_first_word_is_none():
    signal = tone((0.5, 1.0))
    found = durations("ab c", aligned(["▁ab", "▁", "c"], [0.0, 0.6, 0.7], [0.6, 0.7, 1.0]), signal, RATE, 50)
    # "▁ab" is alignment until 0.6: a from 0.2, b from 0.4
    assert found.tolist() == [0, 20, 10, 5, 15, 0]


def test_without_a_separator_every_character_is_one_of_the_text():
    found = durations("ab", aligned(["a", "b"], [0.0, 0.5], [0.5, 1.0], None), tone((0.5, 1.0)), RATE, 10)
    assert found.tolist() == [0, 5, 5, 0]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), frames=st.integers(1, 60), count=st.integers(1, 12), samples=st.integers(RATE // 20, RATE))
def test_durations_are_of_all_frames_and_none_is_negative_wherever_pieces_were_aligned(data, frames, count, samples):
    seconds = samples / RATE
    times = sorted(data.draw(st.lists(st.floats(0, 1.2 * seconds), min_size=2 * count, max_size=2 * count)))
    quiet = data.draw(st.integers(0, samples))
    signal = np.where(np.arange(samples) < quiet, 0.0, 0.3 * np.sin(0.3 * np.arange(samples))).astype(np.float32)
    text = "a" * count
    found = durations(text, aligned(list(text), times[::2], times[1::2], None), signal, RATE, frames)
    assert len(found) == count + 2 and found.sum() == frames and (found >= 0).all()


def test_durations_of_another_text_are_an_error_of_who_calls():
    with pytest.raises(ValueError, match="2 characters are spelled with 1"):
        durations("ab", aligned(["a"], [0.0], [1.0], None), tone((0.5, 1.0)), RATE, 50)


@pytest.mark.parametrize(("parts", "expected"), [
    (((0, 0.3), (0.5, 0.4), (0, 0.3)), (0.3, 0.7)),
    (((0.002, 0.3), (0.5, 0.4), (0.002, 0.3)), (0.3, 0.7)),  # 48 dB below: a room
    (((0.02, 0.3), (0.5, 0.4), (0.02, 0.3)), (0.0, 1.0)),  # 28 dB below: a whisper
    (((0, 1.0),), (0.0, 1.0)), (((0.5, 0.01),), (0.0, 0.01))])
def test_speech_begins_and_ends_where_something_stands_out_and_is_all_where_nothing_does(parts, expected):
    assert speech(tone(*parts), RATE) == pytest.approx(expected, abs=0.021)
