"""Greedy labels by numpy are those of torch, and stay within each utterance."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.decode.best_path import best_path
from sbkit.decode.greedy import greedy
from sbkit.decode.spans import collapse
from sbkit.errors import SbkitError


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(2, 7), st.integers(0, 10_000))
def test_the_same_as_torch(batch, frames, labels, seed):
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy(rng.standard_normal((batch, frames, labels)).astype(np.float32)).log_softmax(-1)
    lengths = rng.integers(0, frames + 1, batch)
    theirs = greedy(scores, torch.from_numpy(lengths))
    ours = collapse(*best_path(scores.numpy(), lengths))
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.ids, expected.ids)
        np.testing.assert_array_equal(mine.starts, expected.starts)
        np.testing.assert_array_equal(mine.ends, expected.ends)
        np.testing.assert_allclose(mine.confidence, expected.confidence, rtol=1e-5)


def test_not_a_number_is_refused_within_an_utterance_and_not_beyond():
    scores = np.log(np.full((2, 3, 2), 0.5, dtype=np.float32))
    scores[1, 2] = np.nan
    assert best_path(scores, np.array([3, 2]))[0].shape == (2, 3)
    with pytest.raises(SbkitError, match=r"utterances \[1\]"):
        best_path(scores, np.array([3, 3]))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="shapes"):
        best_path(np.zeros((2, 3)), np.array([1, 2]))
    labels, confidence = best_path(np.zeros((2, 0, 4), np.float32), np.array([0, 0]))
    assert labels.shape == confidence.shape == (2, 0)
