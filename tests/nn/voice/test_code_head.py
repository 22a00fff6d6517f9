"""The code head: whatever its logits are, each choice is one that its slot has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.nn.codec import FiniteScalars, ResidualVectors
from sbkit.nn.voice import CodeHead

LEVELS = st.lists(st.integers(2, 9), min_size=1, max_size=4)
LOGITS = st.floats(allow_nan=True, allow_infinity=True, width=32)


def head_of(quantiser, logits):
    """A head that gives these logits for any states, and its states."""
    head = CodeHead(1, quantiser)
    with torch.no_grad():
        head.linear.weight.zero_()
        head.linear.bias.copy_(torch.tensor(logits))
    return head, torch.zeros(1, 1, 1)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(levels=LEVELS, books=st.integers(1, 3), data=st.data())
def test_no_logits_at_all_give_a_choice_that_does_not_exist(levels, books, data):
    quantiser = FiniteScalars(levels, books)
    size = len(levels) * books * max(levels)
    head, states = head_of(quantiser, data.draw(st.lists(LOGITS, min_size=size, max_size=size)))
    chosen, numbers = head.choose(states)
    assert chosen.shape == (1, 1, len(levels) * books)
    assert ((chosen >= 0) & (chosen < torch.tensor(quantiser.choices))).all()
    codes = quantiser.joined(chosen)
    assert ((codes >= 0) & (codes < torch.tensor(quantiser.sizes))).all()
    real = head.linear.bias.detach().view(len(levels) * books, -1)[head.exists]
    assert bool(numbers) == bool(real.double().sum().float().isfinite()), "what is no number is told"


def test_the_likeliest_is_chosen_though_one_that_does_not_exist_is_likelier():
    head, states = head_of(FiniteScalars([4, 2]), [0.0, 3.0, 2.0, 1.0, 1.0, 5.0, 9.0, 9.0])
    assert head.choose(states)[0].tolist() == [[[1, 1]]]


def test_the_loss_is_the_cross_entropy_over_what_exists():
    quantiser = FiniteScalars([4, 2], 2)
    torch.manual_seed(0)
    head, states = CodeHead(6, quantiser), torch.randn(2, 5, 6)
    chosen = torch.stack([torch.randint(0, most, (2, 5)) for most in quantiser.choices], -1)
    loss, right = head.loss(states, chosen)
    logits = head.linear(states).view(2, 5, 4, 4)
    by_hand = sum(-logits[..., i, :most].log_softmax(-1).gather(-1, chosen[..., i:i + 1])[..., 0]
                  for i, most in enumerate(quantiser.choices))
    torch.testing.assert_close(loss, by_hand)
    guessed = torch.stack([logits[..., i, :most].argmax(-1) for i, most in enumerate(quantiser.choices)], -1)
    torch.testing.assert_close(right, (guessed == chosen).float().mean(-1))
    loss.sum().backward()
    grad = head.linear.weight.grad.view(4, 4, 6)
    assert grad.isfinite().all() and not grad[~head.exists].any(), "nothing is learnt of what doesn't exist"


@pytest.mark.parametrize("quantiser", [FiniteScalars([8, 5, 5], 2), FiniteScalars([2], 1), ResidualVectors(4, 3, 7, 2)])
def test_choices_and_codes_are_two_ways_to_write_the_same(quantiser):
    generator = torch.Generator().manual_seed(0)
    codes = torch.stack([torch.randint(0, size, (2, 50), generator=generator) for size in quantiser.sizes], -1)
    codes[0, 0], codes[0, 1] = 0, torch.tensor(quantiser.sizes) - 1
    chosen = quantiser.chosen(codes)
    assert chosen.shape == (2, 50, len(quantiser.choices))
    assert ((chosen >= 0) & (chosen < torch.tensor(quantiser.choices))).all()
    assert torch.equal(quantiser.joined(chosen), codes)
    if isinstance(quantiser, FiniteScalars):  # a choice is a level of a number
        top = torch.tensor(quantiser.choices) - 1
        torch.testing.assert_close(quantiser.embed(codes), 2 * chosen / top - 1)
