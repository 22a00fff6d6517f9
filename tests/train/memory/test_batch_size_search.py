"""The largest batch is found in few attempts, and has room for batches of many lengths."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.data.plan import Batching, Plan
from sbkit.recipe import batch_size
from sbkit.train.memory import batch_size_search as sizes
from sbkit.train.memory.trials import Trial


@settings(max_examples=200, deadline=None)
@given(capacity=st.floats(0.5, 5000), edges=st.lists(st.floats(0.5, 30), min_size=1, max_size=6, unique=True),
       most=st.integers(30, 4000), bend=st.floats(0, 0.2))
def test_the_largest_that_fits_is_found_in_few_attempts(capacity, edges, most, bend):
    tried = []

    def needs(n, seconds):
        return n * seconds * (1 + bend * seconds)  # attention grows with the square

    def fits(n, seconds):
        tried.append((n, seconds))
        assert n >= 1 and n * seconds <= most + seconds
        return needs(n, seconds) <= capacity

    edges = sorted(edges)
    found = sizes.search(edges, fits, most, show=False)
    for edge, n in zip(edges, found, strict=True):
        assert n == 0 or needs(n, edge) <= capacity
        beyond = n + max(1, int(sizes.PRECISION * n) + 1)
        assert beyond > most / edge or needs(beyond, edge) > capacity
    assert len(tried) <= 25 * len(edges)


def test_what_is_recommended_has_room_for_batches_of_many_lengths():
    found, tried = batch_size.BatchSize(2, [10.0, 20.0], [60, 30], 400), []

    def fits(n, seconds):
        tried.append(n * seconds)
        return tried[-1] <= 300

    assert sizes.rehearse(found, lambda n, seconds: True) is found and found.seconds == 400
    assert sizes.rehearse(found, fits).seconds == 291  # 400 x 0.9 x 0.9 x 0.9
    assert len(tried) >= sizes.REHEARSED and max(tried[-sizes.REHEARSED:]) <= 291 < 300 < tried[0]
    assert sizes.rehearse(found, lambda n, seconds: False).seconds == 0


@pytest.mark.parametrize("fit, most, seconds, how", [
    (30, 400, 400, "more has no effect, since no step is larger"), (20, 400, 360, "90% of what fits"),
    (1, 400, 20, "90% of what fits"), (0, 400, 0, "not even one of the longest utterances fits")])
def test_what_is_recommended_has_room_for_the_longest_utterance_if_that_fits(fit, most, seconds, how):
    trial = SimpleNamespace(longest=19.9, batching=SimpleNamespace(min_capacity=1), device_name="cpu",
                            brain=SimpleNamespace(precision="fp32"))
    found = batch_size.BatchSize(2.0, [20.0], [fit], most)
    assert sizes.recommended(trial, found) == (seconds, f"cpu with 2 GiB, fp32: {how}")


@pytest.mark.parametrize("longest, least_utterances", [(15.86, 1), (18.604, 1), (19.97, 1), (6.0, 2), (6.0, 3)])
@pytest.mark.parametrize("room", [1000, 1.001, 0.99])
def test_auto_holds_the_longest_utterances_although_a_step_is_shorter(longest, least_utterances, room):
    durations = np.linspace(1.0, longest, 200)
    auto = Batching("auto", step_seconds=15, min_batch_utterances=least_utterances)
    trial = Trial(SimpleNamespace(keys=SimpleNamespace(batching=auto), precision="fp32"), durations,
                  torch.device("cpu"), Path("unused"))
    needed = longest * auto.min_capacity
    counts = sizes.search(trial.edges, lambda n, seconds: n * seconds <= room * needed,
                          trial.most_seconds / sizes.MARGIN, show=False)
    seconds, how = sizes.recommended(trial, batch_size.BatchSize(2.0, trial.edges, counts, trial.most_seconds))
    if room < 1:
        assert seconds == 0 and "not even one" in how
    else:
        assert seconds == np.ceil(needed)
        Plan(durations, Batching(seconds, 15, min_batch_utterances=least_utterances))  # refuses none
