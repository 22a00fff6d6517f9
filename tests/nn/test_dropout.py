"""Dropout's random words: as even, and as independent, as words drawn one by one would be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.nn.fast import dropout

COUNT = 100_000


def dropped(drop, count=COUNT):
    """A new mask: 1 where it drops."""
    return (dropout.draw(count).sums() < dropout.lowest(drop)).double()


def test_words_are_even_in_all_their_bits():
    torch.manual_seed(0)
    words = torch.cat([dropout.draw(COUNT).sums() for _ in range(20)]).int() + (1 << 15)
    expected = len(words) / 256
    for byte in (words >> 8, words & 255):
        counts = torch.bincount(byte, minlength=256).double()
        chi = ((counts - expected) ** 2 / expected).sum().item()
        assert 255 - 5 * 22.6 < chi < 255 + 5 * 22.6  # five standard deviations of chi squared with 255 degrees


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_each_mask_and_each_place_drops_its_share(p):
    torch.manual_seed(1)
    drop, masks = dropout.levels(p), 300
    total = torch.zeros(COUNT, dtype=torch.double)
    shares = []
    for _ in range(masks):
        mask = dropped(drop)
        total += mask
        shares.append(mask.mean().item())
    of_one = (p * (1 - p) / COUNT) ** 0.5
    assert abs(sum(shares) / masks - p) < 5 * of_one / masks**0.5
    assert max(abs(share - p) for share in shares) < 5 * of_one
    spread = torch.tensor(shares).std().item()  # as far apart as independent draws are, and no nearer
    assert 0.8 * of_one < spread < 1.2 * of_one
    assert total.var().item() == pytest.approx(masks * p * (1 - p), rel=0.03)  # no place is dropped more than others


@pytest.mark.parametrize("away", [0, 1, 2, 64, 4096])
def test_a_mask_tells_nothing_of_the_next_nor_of_its_own_other_places(away):
    torch.manual_seed(2)
    drop = dropout.levels(0.3)
    bound = 5 / COUNT**0.5
    last = dropped(drop)
    for _ in range(30):
        new = dropped(drop)
        across = torch.corrcoef(torch.stack([last[away:], new[: COUNT - away]]))[0, 1].item()
        assert abs(across) < bound
        if away:
            within = torch.corrcoef(torch.stack([new[away:], new[:-away]]))[0, 1].item()
            assert abs(within) < bound
        last = new


def test_a_seed_repeats_masks_whatever_was_asked_for_between():
    torch.manual_seed(3)
    first = [dropout.draw(count).sums().clone() for count in (10, 1000)]
    dropout.draw(5_000_000)  # the tables grow
    torch.manual_seed(3)
    again = [dropout.draw(count).sums() for count in (10, 1000)]
    assert all(map(torch.equal, first, again))


def test_a_mask_that_waits_for_its_backward_stays_as_the_tables_grow():
    torch.manual_seed(4)
    x = torch.ones(50, 40, requires_grad=True)
    out = dropout.dropout(x, 0.5, training=True)
    dropout.draw(20_000_000)
    out.sum().backward()
    assert torch.equal(x.grad, out)


def test_dropout_repeats_with_the_seed_and_differs_without():
    x = torch.ones(33, 7)
    torch.manual_seed(3)
    first, second = dropout.dropout(x, 0.3, True), dropout.dropout(x, 0.3, True)
    torch.manual_seed(3)
    assert torch.equal(dropout.dropout(x, 0.3, True), first) and not torch.equal(first, second)
    assert torch.equal(dropout.dropout(x, 0.3, False), x)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(1 / 256, 255 / 256), st.booleans(), st.booleans())
def test_out_and_gradient_are_x_times_one_mask(rows, columns, p, narrow, turned):
    x = torch.rand(rows, columns).add(0.5).to(torch.bfloat16 if narrow else torch.float32)
    x = (x.t() if turned else x).detach().requires_grad_()
    out = dropout.dropout(x, p, training=True)
    out.backward(torch.ones_like(out))
    factor = torch.tensor(dropout.factor(dropout.levels(p)))
    kept = x.grad != 0
    torch.testing.assert_close(out, torch.where(kept, x * factor, 0).to(x.dtype), rtol=1e-2 if narrow else 1e-6, atol=0)
    torch.testing.assert_close(x.grad[kept].float(), factor.expand(int(kept.sum())), rtol=1e-2, atol=0)


@pytest.mark.parametrize("p", [0.0, 0.001, 0.9999, 1.0])
def test_shares_too_near_to_none_or_all_are_torchs(p):
    assert not dropout.levels(p)
    out = dropout.dropout(torch.ones(1000), p, training=True)
    assert out.count_nonzero().item() == pytest.approx(1000 * (1 - p), abs=20)
