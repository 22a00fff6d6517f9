"""One plan of batches for all models."""

import pytest

from sbkit.infer.batches import plan_batches


@pytest.mark.parametrize("lengths, limit, plan", [
    ([], 10, []),
    ([1, 5, 2, 4], 10, [[1, 3], [2, 0]]),
    ([3, 3, 3], 6, [[0, 1], [2]]),
    ([30, 1], 10, [[0], [1]]),
])
def test_batches_have_similar_lengths_within_the_limit(lengths, limit, plan):
    assert plan_batches(lengths, limit) == plan


def test_without_batching_each_signal_runs_alone():
    assert plan_batches([1, 3, 2], 100, batching=False) == [[1], [2], [0]]
