"""The windows of a stream hold the samples of the whole, continued by its mirror image, however its samples come."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.export.layout import Config, Streaming
from sbkit.export.windows import Windows

SIZE, HOP = 40, 16


def config(before=12, after=20, ahead=0):
    streaming = Streaming(chunks=[3] if ahead else [1, 3], ahead=ahead, left=6, overlap=SIZE - HOP, before=before,
                          after=after, state={"seen": {"type": "int64", "shape": []}})
    return Config(sample_rate=1_600, hop_samples=HOP, subsampling=2, vocabulary=5, streaming=streaming)


def frames_of(signal, before, after):
    """Frames of a whole stream: [T, SIZE]."""
    if not len(signal):
        return np.zeros((0, SIZE), np.float32)
    longer = np.pad(signal, (before, after), mode="symmetric")
    count = max(0, (len(longer) - SIZE) // HOP + 1)
    return np.array([longer[i * HOP : i * HOP + SIZE] for i in range(count)], np.float32).reshape(count, SIZE)


def frames_in(windows, given):
    rows = [window.samples[i * HOP : i * HOP + SIZE] for window in given for i in range(window.frames)]
    assert all(len(window.samples) == windows.samples for window in given)
    return np.array(rows, np.float32).reshape(len(rows), SIZE)


@pytest.mark.parametrize(("before", "after"), [(12, 20), (0, 0)])
@given(st.integers(0, 700), st.lists(st.integers(0, 700), max_size=9), st.sampled_from([1, 3]))
@settings(max_examples=60, deadline=None)
def test_for_any_split_they_hold_the_frames_of_the_whole(before, after, samples, cuts, chunk):
    signal = np.arange(1, samples + 1, dtype=np.float32)
    windows = Windows(config(before, after), chunk)
    pieces = np.split(signal, sorted(min(cut, samples) for cut in cuts))
    full = [window for piece in pieces for window in windows.feed(piece)]
    assert {window.frames for window in full} <= {windows.frames}
    last = windows.finish()
    assert all(window.frames == windows.frames for window in last[:-1])
    np.testing.assert_array_equal(frames_in(windows, full + last), frames_of(signal, before, after))


@pytest.mark.parametrize("ahead", [1, 2])
@given(st.integers(0, 700), st.lists(st.integers(0, 700), max_size=9))
@settings(max_examples=60, deadline=None)
def test_each_begins_with_what_the_one_before_only_looked_at(ahead, samples, cuts):
    signal, moves = np.arange(1, samples + 1, dtype=np.float32), 2 * (3 - ahead)
    windows, whole = Windows(config(ahead=ahead), 3), frames_of(signal, 12, 20)
    full = [window for piece in np.split(signal, sorted(min(cut, samples) for cut in cuts))
            for window in windows.feed(piece)]
    given = full + windows.finish()
    assert all(window.frames == windows.frames == 6 for window in [*full, *given[:-1]])
    for number, window in enumerate(given):
        expected = whole[number * moves : number * moves + 6]
        np.testing.assert_array_equal(frames_in(windows, [window]), expected)
    said = moves * len(given[:-1]) + given[-1].frames if given else 0
    assert len(whole) == said, "the last one says the rest"
    assert windows.seconds == moves * HOP / 1_600


def test_a_window_comes_with_its_last_sample_and_what_is_kept_stays_small():
    windows = Windows(config(), 3)
    came = [n for n in range(1, 1_000) for _ in windows.feed(np.ones(1))]
    first = windows.samples - 12
    assert came == list(range(first, 1_000, 3 * 2 * HOP))
    for _ in range(50):
        windows.feed(np.ones(777))
        assert len(windows._kept) < 2 * windows.samples
    assert windows.received == 999 + 50 * 777


def test_after_its_end_another_stream_begins():
    windows, signal = Windows(config(), 1), np.arange(1, 300, dtype=np.float32)
    windows.feed(np.ones(123))
    windows.reset()
    assert windows.finish() == []
    windows.feed(np.ones(123))
    windows.finish()
    found = windows.feed(signal) + windows.finish()
    np.testing.assert_array_equal(frames_in(windows, found), frames_of(signal, 12, 20))
