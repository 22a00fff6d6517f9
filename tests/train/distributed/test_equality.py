"""The hash by which ranks are compared sees every bit and its place."""

from __future__ import annotations

import pytest
import torch

from sbkit.train.distributed.equality import fingerprint

#: More than what is hashed at once.
MANY = (1 << 20) + 77


def values(dtype: torch.dtype, count: int = 1000) -> torch.Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0))
    return drawn > 0 if dtype is torch.bool else (drawn * 50).abs().to(dtype)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8,
          torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_values_have_equal_hashes_in_any_layout(dtype):
    square = values(dtype, 900).view(30, 30)
    assert fingerprint(square) == fingerprint(square.clone()) == fingerprint(square.t().contiguous().t())
    assert fingerprint(square) == fingerprint(square.flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swapped_values_have_another_hash(dtype):
    one = values(dtype)
    other = one.clone()
    place = next(i for i in range(1, len(one)) if one[i] != one[0])
    other[0], other[place] = one[place], one[0]
    assert fingerprint(one) != fingerprint(other)


def test_values_swapped_across_what_is_hashed_at_once_have_another_hash():
    one = values(torch.float32, MANY)
    other = one.clone()
    other[5], other[MANY - 1] = one[MANY - 1], one[5]
    assert fingerprint(one) != fingerprint(other)
    moved = torch.cat([one[1 << 20:], one[:1 << 20]])
    assert fingerprint(one) != fingerprint(moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_two_changed_signs_do_not_cancel(dtype):
    one = values(dtype)
    hashes = set()
    for place in range(1, 200):
        other = one.clone()
        other[0] *= -1
        other[place] *= -1
        hashes.add(int(fingerprint(other)))
    assert len(hashes) == 199 and int(fingerprint(one)) not in hashes


def test_a_scalar_and_nothing_have_a_hash():
    assert fingerprint(torch.tensor(2.5)) != fingerprint(torch.tensor(2.0))
    assert fingerprint(torch.zeros(0)) == 0
