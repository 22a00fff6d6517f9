"""A mixture's drawing: parts in proportion in every step, each through its own rows, the same on any ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.data.part_sampler import Parts, PartSampler
from sbkit.data.plan import Batching, Plan

pytestmark = pytest.mark.slow

rows = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60).map(lambda quarters: quarters / 4)), min_size=1,
                max_size=120)


def parts_of(numbers: list[int], shares: list[float]) -> Parts:
    """Of the numbers that occur, with their shares."""
    there = sorted(set(numbers))
    return Parts(np.array([there.index(number) for number in numbers]), {f"part {i}": shares[i] for i in there})


@settings(max_examples=100, deadline=None)
@given(rows, st.lists(st.floats(0.01, 10), min_size=4, max_size=4), st.integers(1, 4), st.integers(1, 3),
       st.integers(0, 5))
def test_each_part_goes_through_its_rows_as_often_as_its_share_says(made, shares, count, least, seed):
    numbers, seconds = (list(column) for column in zip(*made, strict=True))
    seconds = np.array(seconds)
    buckets = np.searchsorted(np.quantile(seconds, np.arange(1, count) / count), seconds)
    buckets = np.unique(buckets, return_inverse=True)[1]
    parts = parts_of(numbers, shares)
    draws = PartSampler(parts, seconds, buckets, least, seed)
    times_drawn, visits = np.zeros(len(seconds), int), [Counter() for _ in seconds]
    for number in range(1, 6):
        drawn, times = draws.draw(number)
        assert np.bincount(buckets[drawn], minlength=len(draws.sizes)).tolist() == draws.sizes.tolist()
        assert (np.diff(buckets[drawn]) >= 0).all()
        for row, time in zip(drawn.tolist(), times.tolist(), strict=True):
            visits[row][time] += 1
        times_drawn += np.bincount(drawn, minlength=len(seconds))
        for bucket in range(len(draws.sizes)):
            for part in range(len(parts.shares)):
                of = times_drawn[(buckets == bucket) & (parts.numbers == part)]
                assert not len(of) or of.max() - of.min() <= 1, "none again before all were drawn"
    # The pass numbers of a row are 1, 2, 3, ...
    assert all(found == Counter(range(1, times + 1)) for found, times in zip(visits, times_drawn.tolist(), strict=True))
    other = PartSampler(parts, seconds, buckets, least, seed).draw(5)
    assert other[0].tolist() == drawn.tolist() and other[1].tolist() == times.tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.data(), st.integers(1, 40))
def test_draws_are_in_proportion_and_passes_add_up(counts, data, passes):
    """Of a bucket's draws so far, a part has its share, to within one for each other part."""
    shares = data.draw(st.lists(st.floats(0.01, 1), min_size=len(counts), max_size=len(counts)))
    numbers = np.repeat(np.arange(len(counts)), counts)
    parts = Parts(numbers, {str(i): share for i, share in enumerate(shares)})
    draws = PartSampler(parts, np.ones(len(numbers)), np.zeros(len(numbers), int))
    taken = [draws.drawn(number)[0] for number in range(passes + 1)]
    assert all((later >= before).all() for before, later in itertools.pairwise(taken))
    assert [int(each.sum()) for each in taken] == [number * len(numbers) for number in range(passes + 1)]
    exact = passes * len(numbers) * np.array(shares) / sum(shares)
    assert np.abs(taken[-1] - exact).max() <= (len(counts) + 1) / 2 + 1e-6


def mixture(n: int = 3000, many: int = 3) -> tuple[np.ndarray, Parts]:
    """Durations like Common Voice's, of parts of which each is a third of the one before."""
    draw = np.random.default_rng(0)
    weights = 3.0 ** -np.arange(many)
    numbers = draw.choice(many, n, p=weights / weights.sum())
    return np.clip(draw.lognormal(1.5, 0.45, n), 0.8, 20), Parts(numbers, dict.fromkeys("abcdefgh"[:many], 1.0))


def test_each_step_has_its_parts_in_proportion_on_any_number_of_ranks():
    seconds, parts = mixture()
    plan = Plan(seconds, Batching(60, 120), parts=parts, round_seconds=0.32)
    buckets = np.searchsorted(plan.edges, plan.durations)
    of_bucket = np.array([np.bincount(parts.numbers[buckets == bucket], minlength=3)
                          for bucket in range(len(plan.edges))]) * plan.sampler.parts.times
    for epoch in (1, 2, 9):
        made, audio = plan.epoch(epoch), np.zeros(3)
        assert len(made) == len(plan)
        for step in range(len(made)):
            members = made.step(step)
            counts = np.bincount(parts.numbers[members], minlength=3)
            wanted = of_bucket[np.searchsorted(plan.edges, plan.durations[members].max())]
            assert abs(counts - len(members) * wanted / wanted.sum()).max() < 1.5
            audio += np.bincount(parts.numbers[members], weights=seconds[members], minlength=3)
            for world in (1, 2, 3):
                places = [one for rank in range(world) for one in made.micro_batches(step, rank, world)]
                assert sorted(np.concatenate(places).tolist()) == sorted(
                    np.concatenate(made.micro_batches(step, 0, 1)).tolist())
        assert audio / audio.sum() == pytest.approx(1 / 3, abs=0.01)
        assert audio.sum() == pytest.approx(seconds.sum(), rel=0.01)
    assert plan.sampler.parts.times == pytest.approx(
        plan.durations.sum() / 3 / np.bincount(parts.numbers, weights=plan.durations), rel=1e-6)


def test_a_later_epoch_is_found_without_those_before_it_and_goes_on_where_they_ended():
    seconds, parts = mixture(400)
    plan = Plan(seconds, Batching(60, 120, min_steps=300), parts=parts, epochs=7)
    assert plan.passes > 1
    seen = np.zeros(len(seconds), int)
    for epoch in range(1, 8):
        made = plan.epoch(epoch)
        for step in range(len(made)):
            for places in made.micro_batches(step):
                for row, visit in zip(made.members[places].tolist(), made.pass_numbers(places).tolist(), strict=True):
                    seen[row] += 1
                    assert abs(visit - seen[row]) <= plan.passes * 10  # within an epoch steps are shuffled
    visits = made.pass_numbers(np.arange(len(made.members)))
    assert visits.max() == seen.max()


def test_rows_of_a_part_keep_their_order_whatever_it_is_mixed_with():
    seconds = np.ones(40)
    alone = PartSampler(Parts(np.zeros(40, int), {"a": 1}), seconds, np.zeros(40, int)).draw(1)[0]
    for others in (1, 3):
        numbers = np.concatenate([np.repeat(np.arange(others), 25) + 1, np.zeros(40, int)])
        shares = {"a": 1.0, **{f"other {i}": 1.0 for i in range(others)}}
        both = PartSampler(Parts(numbers, shares), np.ones(len(numbers)), np.zeros(len(numbers), int))
        own = np.concatenate([both.draw(number)[0] for number in (1, 2, 3)])
        own = own[own >= 25 * others] - 25 * others
        assert own[:40].tolist() == alone.tolist()


def test_a_part_with_a_share_of_nothing_is_never_drawn():
    seconds, parts = mixture(500)
    plan = Plan(seconds, Batching(60), parts=Parts(parts.numbers, {"a": 1.0, "b": 0.0, "c": 2.0}))
    drawn = np.bincount(parts.numbers[plan.epoch(1).members], minlength=3)
    assert drawn[1] == 0 < min(drawn[0], drawn[2])
    with refused("part-without-rows"):
        Plan(seconds, Batching(60), parts=Parts(parts.numbers, {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}))
    with refused("conflicting-options"):
        Plan(seconds, Batching(600, clips_per={"speaker": 2}), labels=parts.numbers, parts=parts)


def test_two_million_rows_in_a_hundred_parts_are_planned_in_seconds():
    draw = np.random.default_rng(0)
    seconds = np.clip(draw.lognormal(1.5, 0.45, 2_000_000), 0.8, 30).astype(np.float32)
    numbers = draw.choice(100, len(seconds), p=draw.dirichlet(np.ones(100)))
    shares = {str(i): float(hours) ** 0.5 for i, hours in enumerate(np.bincount(numbers, minlength=100))}
    start = process_time()  # of this process alone, however busy the machine is
    epoch = Plan(seconds, Batching(200, 1600), parts=Parts(numbers, shares)).epoch(50)
    epoch.share(len(epoch) - 1, 7, 8)
    assert process_time() - start < 8


@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.floats(0.05, 0.9), st.integers(1, 5))
def test_a_pass_goes_through_one_part_once_however_long_the_others_are(counts, share, passes):
    numbers = np.repeat(np.arange(len(counts)), counts)
    shares = {"0": 1 - share, **{str(i): share / (len(counts) - 1) for i in range(1, len(counts))}}
    draws = PartSampler(Parts(numbers, shares, "0"), np.ones(len(numbers)), np.zeros(len(numbers), int))
    assert draws.times[0] == 1 and draws.sizes.sum() == pytest.approx(counts[0] / (1 - share), abs=1)
    drawn = np.concatenate([draws.draw(number)[0] for number in range(1, passes + 1)])
    times_drawn = np.bincount(drawn[drawn < counts[0]], minlength=counts[0])
    rounded = passes / 2 + (len(counts) + 1) / 2 + 1  # draws: half a one in each pass, and as above
    assert abs(times_drawn - passes).max() <= np.ceil(rounded / counts[0])
