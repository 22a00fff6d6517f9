"""The recipe as shipped learns whatever is asked of it: the design of the benchmark's runs, and a cheap one of them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools import bench_convergence as bench

values = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(tuple)


@settings(deadline=None, max_examples=30)
@given(st.tuples(values, values, values))
def test_every_pair_of_values_that_is_possible_occurs_in_some_run(lists):
    factors = {"epochs": lists[0], "corpus": lists[1], "model": lists[2]}
    everything = [dict(zip(factors, each, strict=True)) for each in itertools.product(*factors.values())]
    wanted = {pair for run in filter(bench.possible, everything) for pair in bench.pairs(run)}
    runs = bench.design(factors)
    assert wanted == {pair for run in runs for pair in bench.pairs(run)}
    assert len(runs) <= len(everything)


def test_the_design_is_small():
    assert len(bench.design(bench.FACTORS)) <= 30


@pytest.mark.slow
def test_a_short_run_at_three_times_the_rate_learns(tmp_path):
    """Of a tenth of an hour, in steps of 5 s: a third of the time of the benchmark's own runs."""
    run = {"corpus": 0.1, "epochs": 3, "tokens": "char", "seed": 5, "rate": 3.0, "processes": 1, "model": "small"}
    found = bench.train(run, tmp_path, None, peak=0.002, more=["--step_seconds", "5"])
    assert found["cer"] < bench.LEARNT and not found["told"]
