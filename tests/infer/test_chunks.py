"""Cutting: every sample is answered for exactly once, chunks stay within their size, cuts lie in pauses."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.infer.chunks import CONTEXT_SECONDS, cut

RATE, FRAME = 1000, 40


def pieces(signal, sizes):
    at, i = 0, 0
    while at < len(signal):
        size = sizes[i % len(sizes)]
        yield signal[at : at + size]
        at, i = at + size, i + 1


def where_loud(signal, frame):
    """A detector that takes whatever is loud for speech, by frame."""
    padded = np.pad(np.abs(signal), (0, -len(signal) % frame))
    return padded.reshape(-1, frame).max(axis=1) > 0.5


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seconds=st.floats(0.01, 60), chunk=st.floats(0.5, 15), sizes=st.lists(st.integers(1, 7000), min_size=1, max_size=4),
    seed=st.integers(0, 1000), loud=st.booleans(), detector=st.sampled_from([None, where_loud]),
)
def test_the_kept_frames_of_all_chunks_are_the_frames_of_the_recording(seconds, chunk, sizes, seed, loud, detector):
    size = max(1, int(seconds * RATE))
    rng = np.random.default_rng(seed)
    envelope = np.ones(size) if loud else np.repeat(rng.uniform(0, 1, size // 300 + 1) ** 8, 300)[:size]
    signal = (envelope * rng.choice([-1.0, 1.0], size)).astype(np.float32)
    order = []
    at = 0
    for number, each in enumerate(list(cut(pieces(signal, sizes), RATE, FRAME, chunk, detector))):
        assert len(each.signal) <= max(int(chunk * RATE), 4 * FRAME)
        assert (each.spoken is None) == (detector is None)
        first = at * FRAME - each.skip * FRAME
        assert first >= 0 and first % FRAME == 0
        np.testing.assert_array_equal(each.signal, signal[first : first + len(each.signal)])
        assert each.skip <= -(-CONTEXT_SECONDS * RATE // FRAME)
        if each.keep is None:
            assert first + len(each.signal) == size, f"chunk {number} is the last, and ends where the recording does"
            order.append(range(at, size // FRAME + 1))
        else:
            assert each.keep > 0 and (each.skip + each.keep) * FRAME <= len(each.signal)
            order.append(range(at, at + each.keep))
            at += each.keep
    assert [frame for part in order for frame in part] == list(range(size // FRAME + 1))


def test_cuts_are_in_pauses_without_overlap():
    rng = np.random.default_rng(0)
    pauses = [7.0, 15.0, 22.5]
    signal = rng.standard_normal(30 * RATE).astype(np.float32)
    for pause in pauses:
        signal[int(pause * RATE) : int((pause + 0.4) * RATE)] *= 0.001
    chunks = list(cut(iter([signal]), RATE, FRAME, 10.0))
    ends = np.cumsum([each.keep for each in chunks[:-1]]) * FRAME / RATE
    assert [any(pause <= end <= pause + 0.4 for pause in pauses) for end in ends] == [True] * len(ends)
    assert all(each.skip == 0 for each in chunks)
    assert len(chunks) == 4


def test_a_detector_finds_pauses_that_are_as_loud_as_speech():
    spoken = np.ones(40 * RATE // FRAME, bool)
    for second in (3, 7, 15, 22, 30):
        spoken[second * RATE // FRAME:][:20] = False
    signal = np.repeat(spoken, FRAME) + np.float32(0.4)  # 11 dB between speech and noise
    chunks = list(cut(pieces(signal, [777]), RATE, FRAME, 10.0, where_loud))
    ends = np.cumsum([each.keep for each in chunks[:-1]])
    assert ends.tolist() == [second * RATE // FRAME + 10 for second in (7, 15, 22, 30)]
    assert not any(each.continues or each.skip for each in chunks)
    np.testing.assert_array_equal(np.concatenate([each.spoken for each in chunks]), spoken)


def marks_late(signal, frame):
    """A detector that marks a word once it has heard three frames of it, and then six frames around it as well."""
    loud, spoken = where_loud(signal, frame), np.zeros(-(-len(signal) // frame), bool)
    for at in range(len(loud) - 2):
        if loud[at:at + 3].all():
            spoken[max(at - 6, 0):at + 9] = True
    return spoken


@pytest.mark.parametrize("noise", [0.001, 0.4])
def test_a_word_at_the_end_of_a_chunk_is_not_cut(noise):
    signal = np.ones(20 * RATE, np.float32)
    signal[9_650:9_920] = noise
    first = next(cut([signal], RATE, FRAME, 10.0, marks_late))
    if noise == 0.4:  # not so quiet that it is surely a pause
        assert first.continues and len(first.signal) >= (first.keep * FRAME + CONTEXT_SECONDS * RATE)
    else:
        assert 9_650 <= first.keep * FRAME <= 9_920 and not first.continues


def test_output_is_blank_during_silence():
    noise = np.full(4 * FRAME, 0.4, np.float32)
    [silent] = cut([noise], RATE, FRAME, 10.0, where_loud)
    assert silent.silent and silent.output(None, 1, 3).argmax(-1).tolist() == [1] * 4
    [spoken] = cut([noise + np.repeat(np.float32([0, 1, 1, 0]), FRAME)], RATE, FRAME, 10.0, where_loud)
    words = np.float32([[0.0, -9, -9]] * 5)  # a frame more than there is audio for
    assert not spoken.silent and spoken.output(words, 1, 3).argmax(-1).tolist() == [1, 0, 0, 1, 1]
    [unknown] = cut([noise], RATE, FRAME, 10.0)
    assert not unknown.silent and unknown.output(words, 1, 3) is words


def test_speech_without_a_pause_is_cut_with_context_on_both_sides():
    signal = np.random.default_rng(0).standard_normal(40 * RATE).astype(np.float32)
    chunks = list(cut(iter([signal]), RATE, FRAME, 10.0))
    for before, after in pairwise(chunks):
        beyond = len(before.signal) / FRAME - before.skip - before.keep
        assert beyond * FRAME / RATE >= CONTEXT_SECONDS and after.skip * FRAME / RATE >= CONTEXT_SECONDS


def test_memory_holds_one_chunk_at_a_time():
    held = []

    def endless():
        for _ in range(200):
            block = np.ones(10 * RATE, dtype=np.float32)
            held.append(block)
            yield block

    longest = max(len(each.signal) for each in cut(endless(), RATE, FRAME, 20.0))
    assert longest <= 20 * RATE


@pytest.mark.parametrize("size", [1, FRAME - 1, FRAME, 3 * FRAME])
def test_the_shortest_recordings_are_one_chunk(size):
    chunks = list(cut(iter([np.ones(size, np.float32)]), RATE, FRAME, 10.0))
    assert [(len(each.signal), each.skip, each.keep) for each in chunks] == [(size, 0, None)]
    assert list(cut(iter([]), RATE, FRAME, 10.0)) == []
