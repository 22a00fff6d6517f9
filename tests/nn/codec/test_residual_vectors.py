"""Residual vector quantisation: books in turn, trained by gradients, with no state beside their parameters."""

import pytest
import torch
from refusals import refused

from sbkit.nn.codec import ResidualVectors


@pytest.fixture
def quantiser():
    torch.manual_seed(0)
    return ResidualVectors(16, codebooks=3, entries=32, code_size=4)


def test_codes_give_back_the_vectors_they_were_made_with(quantiser):
    vectors, codes, _ = quantiser(torch.randn(2, 7, 16))
    assert codes.shape == (2, 7, 3) and codes.min() >= 0 and codes.max() < 32
    torch.testing.assert_close(quantiser.embed(codes), vectors)


def test_each_book_takes_its_part_of_what_is_left(quantiser):
    vectors, left = torch.randn(2, 7, 16), torch.zeros(2, 7, 16)
    codes = quantiser(vectors).codes
    for i, book in enumerate(quantiser.books):
        assert torch.equal(book(vectors - left)[1], codes[..., i])
        left = left + book.lookup(codes[..., i])


def test_the_penalty_trains_tables_and_vectors_and_is_of_each_frame(quantiser):
    vectors = torch.randn(2, 7, 16, requires_grad=True)
    penalty = quantiser(vectors).penalty
    assert penalty.shape == (2, 7) and (penalty >= 0).all()
    penalty.sum().backward()
    assert vectors.grad.abs().sum() > 0 and all(book.table.grad.abs().sum() > 0 for book in quantiser.books)


def test_training_brings_the_books_to_the_vectors(quantiser):
    points = torch.randn(24, 16)
    optimizer = torch.optim.AdamW(quantiser.parameters(), lr=1e-2)

    def missed():
        found = quantiser(points[None])
        return (found.vectors - points).square().mean() + found.penalty.mean()

    before = missed().item()
    for _ in range(150):
        missed().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert missed().item() < 0.3 * before


def test_all_of_its_state_is_in_its_parameters(quantiser):
    assert set(quantiser.state_dict()) == {name for name, _ in quantiser.named_parameters()}
    assert quantiser.sizes == (32, 32, 32) and quantiser.bits == 15


def test_a_code_outside_its_book_is_refused(quantiser):
    with refused("index-out-of-range"):
        quantiser.embed(torch.tensor([[[0, 0, 0], [31, 31, 32]]]))
