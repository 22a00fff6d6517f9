"""Finite scalar quantisation: every code is one of its book's, every one of them is reachable, and none is lost."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sbkit.nn.codec import FiniteScalars

LEVELS = st.lists(st.integers(2, 9), min_size=1, max_size=4)
NUMBERS = st.floats(allow_nan=False, allow_infinity=True, width=32)


@given(levels=LEVELS, books=st.integers(1, 3))
def test_each_code_of_each_book_is_reached_from_its_own_vector(levels, books):
    quantiser = FiniteScalars(levels, books)
    entries = math.prod(levels)
    assert quantiser.sizes == (entries,) * books and quantiser.size == books * len(levels)
    codes = torch.arange(entries)[None, :, None].repeat(1, 1, books)
    vectors = quantiser.embed(codes)
    assert len({tuple(vector) for vector in vectors[0].tolist()}) == entries, "no two codes have one vector"
    found, again, _ = quantiser(torch.atanh(vectors.clamp(-0.9999, 0.9999)))
    assert torch.equal(again, codes)
    torch.testing.assert_close(found, vectors)


@given(levels=LEVELS, books=st.integers(1, 3), data=st.data())
def test_whatever_comes_in_the_code_is_in_its_book_and_gives_back_its_vector(levels, books, data):
    quantiser = FiniteScalars(levels, books, noise=1.0)  # of training, which this isn't
    quantiser.eval()
    size = quantiser.size
    drawn = data.draw(st.lists(st.lists(NUMBERS, min_size=size, max_size=size), min_size=1, max_size=4))
    vectors, codes, _ = quantiser(torch.tensor([drawn]))
    assert codes.dtype == torch.int64 and codes.shape == (1, len(drawn), books)
    assert ((codes >= 0) & (codes < torch.tensor(quantiser.sizes))).all()
    assert vectors.abs().max() <= 1
    torch.testing.assert_close(quantiser.embed(codes), vectors, atol=1e-6, rtol=0)


def test_numbers_go_to_the_nearest_level():
    quantiser = FiniteScalars([3, 2])
    for (first, a), (second, b) in itertools.product([(-0.9, 0), (-0.4, 1), (0.4, 1), (0.6, 2)], [(-0.1, 0), (0.1, 1)]):
        code = quantiser(torch.atanh(torch.tensor([[[first, second]]]))).codes
        assert code.item() == a + 3 * b


def test_gradients_pass_as_if_nothing_had_been_rounded():
    vectors = torch.tensor([[[0.3, -0.7]]], requires_grad=True)
    FiniteScalars([8, 5])(vectors).vectors.sum().backward()
    torch.testing.assert_close(vectors.grad, 1 - vectors.detach().tanh().square())


def test_noise_takes_the_place_of_rounding_for_its_share_of_the_utterances_in_training_alone():
    torch.manual_seed(0)
    quantiser, vectors = FiniteScalars([8, 5, 5, 5], noise=0.5), torch.randn(400, 3, 4)
    found = quantiser(vectors)
    rounded = quantiser.lookup(found.codes)
    differs = (found.vectors - rounded).abs().amax((1, 2)) > 1e-5
    assert 0.4 < differs.float().mean() < 0.6
    top = torch.tensor([7.0, 4.0, 4.0, 4.0])
    exact = (vectors.tanh() + 1) / 2 * top
    off = ((found.vectors + 1) / 2 * top - exact).abs()
    assert off.max() <= 0.5001 and 0.2 < off[differs].mean() < 0.3, "as strong as rounding"
    torch.testing.assert_close(quantiser.eval()(vectors).vectors, rounded)


@pytest.mark.parametrize("wrong", [-1, 1000, 1063])
def test_a_code_outside_its_book_is_refused_and_named(wrong):
    quantiser = FiniteScalars([8, 5, 5, 5], codebooks=2)
    codes = torch.zeros(1, 4, 2, dtype=torch.long)
    codes[0, 3, 1] = wrong
    with refused("index-out-of-range"):
        quantiser.embed(codes)
    assert quantiser.embed(torch.full((1, 1, 2), 999)).shape == (1, 1, 8)


@pytest.mark.parametrize("options", [{"levels": []}, {"levels": [8, 1]}, {"codebooks": 0}, {"noise": 1.5}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=r"use 1 codebook or more|not a share"):
        FiniteScalars(**options)
