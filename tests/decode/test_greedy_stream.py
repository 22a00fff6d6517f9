"""A stream decoded greedily: when its words settle, what is shown, and constant memory."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.decode.greedy_stream import GreedyStream
from sbkit.decode.spans import LONGEST_SECONDS, Spelling, best_path, collapse
from tests.decode.streams import MARKED, listen, log_probs_of, runs

FRAME = 0.04


def stream():
    return GreedyStream(Spelling(MARKED, FRAME, {0, 1}))


def whole(log_probs):
    tokens, = collapse(*best_path(log_probs[None], np.array([len(log_probs)])))
    return Spelling(MARKED, FRAME, {0, 1}).words(tokens)


def say(labels):
    return log_probs_of(labels, len(MARKED))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(runs(len(MARKED)), st.data())
def test_shown_words_are_those_of_all_frames_so_far(labels, data):
    log_probs = say(labels)[:data.draw(st.integers(0, len(labels)))]
    result = listen(stream(), [log_probs])
    assert result.settled + result.partial == whole(log_probs)


def test_a_word_settles_when_the_next_begins_and_at_a_pause():
    decoder = stream()
    first, = decoder.feed(say([5, 4, 0, 5]))
    assert [word.text for word in first.settled] == ["ab"] and [word.text for word in first.partial] == ["a"]
    waiting, = decoder.feed(say([0] * 17))  # 0.68 s
    assert (waiting.settled, waiting.endpoint, len(waiting.partial)) == ([], False, 1)
    ended, = decoder.feed(say([0] * 2))
    assert ended.endpoint and [word.text for word in ended.settled] == ["a"] and ended.partial == []
    assert ended.seconds == pytest.approx((4 + 18) * FRAME)
    quiet, = decoder.feed(say([0] * 100))
    assert (quiet.settled, quiet.partial, quiet.endpoint) == ([], [], False), "a line ends once"
    assert not decoder.finish().endpoint


def test_lines_within_one_piece_are_returned_one_by_one():
    said = stream().feed(say(([5] + [0] * 20) * 2 + [5, 5]))
    assert [each.endpoint for each in said] == [True, True, False]
    assert [len(each.settled) for each in said] == [1, 1, 0] and len(said[-1].partial) == 1


def test_the_end_of_the_stream_ends_the_line():
    decoder = stream()
    decoder.feed(say([5, 0, 5]))
    last = decoder.finish()
    assert last.endpoint and [word.text for word in last.settled] == ["a"] and last.seconds == pytest.approx(3 * FRAME)


@pytest.mark.parametrize("wrong, code", [
    (np.full((3, len(MARKED)), np.nan, np.float32), "nan-output"), (np.zeros((3, 4), np.float32), "tokenizer-mismatch"),
    (np.full((3, len(MARKED)), 2.0, np.float32), "not-log-probabilities"),
    (np.zeros((3, len(MARKED)), np.int64), "tokenizer-mismatch"),
    (np.full((3, len(MARKED)), np.inf, np.float32), "nan-output"),
    (np.zeros(len(MARKED), np.float32), "tokenizer-mismatch"),
])
def test_what_is_refused_leaves_the_stream_as_it_was(wrong, code):
    log_probs = say([5, 4, 4, 0, 5, 3])
    decoder = stream()
    decoder.feed(log_probs[:3])
    with refused(code):
        decoder.feed(wrong)
    rest = listen(decoder, [log_probs[3:]], finish=True)
    assert rest.settled == whole(log_probs)


LONG = {
    "speech": [5, 4, 0, 3, 0, 5, 0, 0], "lines": [5, 4, 0, 3] + [0] * 30, "silence": [0], "one token": [3],
    "an endless word": [3, 4], "no token alone": [7, 0], "silent tokens": [1, 0], "marks": [2, 0],
    "a mark before each pause": [2] + [0] * 20,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind != "speech")) for kind in LONG])
def test_twenty_minutes_take_constant_memory(kind):
    pattern = LONG[kind]
    labels = np.resize(pattern, int(1200 / FRAME))
    confidence = np.full(len(labels), 0.9, np.float32)
    decoder, sizes, longest = stream(), [], 0
    for start in range(0, len(labels), 16):
        for each in decoder.decode(labels[start:start + 16], confidence[start:start + 16]):
            longest = max(longest, len(each.settled) + len(each.partial))
        sizes.append(len(pickle.dumps(decoder)))
    bounded = int(2 * LONGEST_SECONDS / FRAME)
    first = max(sizes[:bounded // 16])
    assert max(sizes) <= 1.05 * first + 64, "the first seconds need as much"
    assert longest <= bounded


def test_a_word_without_end_is_ended():
    labels = [3, 4] * int(1.5 * LONGEST_SECONDS / FRAME / 2)
    result = listen(stream(), [say(labels)], finish=True)
    assert len(result.settled) == 2 and len(result.lines) == 1
    assert result.settled[0].end - result.settled[0].start == pytest.approx(LONGEST_SECONDS)
