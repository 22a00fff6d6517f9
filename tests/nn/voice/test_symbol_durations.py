"""Durations of symbols: rounding loses no time at any speed, and each frame gets its own symbol's state."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.nn.voice import voice
from sbkit.nn.voice.voice import MAX_LOG_FRAMES, rounded, spread

PREDICTED = st.lists(st.lists(st.floats(-2, 4, width=32), min_size=7, max_size=7), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(predicted=PREDICTED, speed=st.floats(0.25, 4, width=32), data=st.data())
def test_rounding_keeps_the_whole_time_at_any_speed_and_no_symbol_is_off_by_more_than_a_frame(predicted, speed, data):
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, 7), min_size=len(predicted), max_size=len(predicted))))
    wanted = torch.tensor(predicted)
    found = rounded(wanted, lengths, torch.full((len(predicted),), speed))
    assert found.dtype == torch.int64 and (found >= 0).all()
    for row, logs, length in zip(found.tolist(), predicted, lengths.tolist(), strict=True):
        exact = [(math.exp(min(max(log, 0.0), MAX_LOG_FRAMES)) - 1) / speed for log in logs[:length]]
        assert not any(row[length:])
        assert sum(row) == max(1, round(sum(exact))) or abs(sum(exact) % 1 - 0.5) < 1e-4, "or it was a tie"
        if sum(exact) >= 1:
            assert all(abs(frames - each) <= 1 + 1e-4 for frames, each in zip(row, exact, strict=False))


@pytest.mark.parametrize("log", [-50.0, 0.0])
def test_a_text_of_which_nothing_would_be_heard_has_a_frame(log):
    assert rounded(torch.full((1, 4), log), torch.tensor([3]), torch.ones(1)).tolist() == [[0, 0, 1, 0]]


def test_no_symbol_is_longer_than_the_most():
    found = rounded(torch.tensor([[100.0, 0.0]]), torch.tensor([2]), torch.tensor([0.25]))
    assert found.sum() == round((math.exp(MAX_LOG_FRAMES) - 1) / 0.25)


@settings(max_examples=100, deadline=None)
@given(frames=st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any), more=st.integers(0, 5))
def test_spread_gives_each_frame_its_symbols_state_and_its_place_in_it(frames, more):
    states = torch.arange(len(frames)).float()[None, :, None] + torch.tensor([0.0, 0.5])
    found, place = spread(states, torch.tensor([frames]), sum(frames) + more)
    slow = [(symbol, (i + 0.5) / count, 1 - (i + 0.5) / count, math.log(count))
            for symbol, count in enumerate(frames) for i in range(count)]
    assert found.shape == (1, sum(frames) + more, 2) and found.isfinite().all() and place.isfinite().all()
    assert found[0, :sum(frames), 0].tolist() == [symbol for symbol, *_ in slow]
    torch.testing.assert_close(place[0, :sum(frames)], torch.tensor([each for _, *each in slow]))


def test_spread_takes_no_state_of_another_row():
    states = torch.arange(6).float().view(2, 3, 1)
    found, _ = spread(states, torch.tensor([[1, 0, 2], [2, 1, 1]]), 4)
    assert found[..., 0].tolist() == [[0, 2, 2, 2], [3, 3, 4, 5]]


def test_the_loss_is_a_sum_over_an_utterances_own_symbols():
    predicted, frames = torch.tensor([[1.0, 2.0, 9.0], [0.0, 1.0, 0.5]]), torch.tensor([[3, 0, 7], [1, 2, 0]])
    found = voice.duration_loss(predicted, frames, torch.tensor([2, 3]))
    wanted = [(1 - math.log(4)) ** 2 + 2.0 ** 2, math.log(2) ** 2 + (1 - math.log(3)) ** 2 + 0.5 ** 2]
    torch.testing.assert_close(found, torch.tensor(wanted))
    assert voice.duration_loss(predicted, frames, torch.tensor([0, 0])).tolist() == [0.0, 0.0]
