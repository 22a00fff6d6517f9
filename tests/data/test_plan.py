"""The plan: every utterance once per epoch, always another order, the same steps however shared."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.data.manifest import Manifest
from sbkit.data.plan import Batching, Plan, unit_of
from sbkit.data.shapes import MAX_SHAPES


def corpus(n: int = 3000, seed: int = 0) -> np.ndarray:
    """Durations like Common Voice's."""
    return np.clip(np.random.default_rng(seed).lognormal(1.5, 0.45, n), 0.8, 20).astype(np.float32)


def steps_of(plan: Plan, epoch: int) -> list[list[int]]:
    order = plan.epoch(epoch)
    return [order.step(i).tolist() for i in range(len(order))]


durations = st.lists(st.integers(1, 240).map(lambda eighths: eighths / 8), min_size=1, max_size=200)


@settings(max_examples=150, deadline=None)
@given(durations, st.floats(30, 300), st.floats(1, 600), st.one_of(st.none(), st.integers(1, 20)),
       st.integers(1, 50), st.sampled_from([None, "ascending", "descending"]), st.sampled_from([0, 0.32, 3]))
def test_every_utterance_is_in_one_step_and_steps_keep_their_size(seconds, most, step, buckets, epoch, sort, rounded):
    plan = Plan(seconds, Batching(most, step, buckets=buckets, sort=sort), round_seconds=rounded)
    assert np.all(plan.durations >= np.float32(seconds)) and np.all(plan.durations <= np.float32(most))
    assert np.all(plan.durations - seconds <= rounded + 1e-3)
    steps = steps_of(plan, epoch)
    assert sorted(i for members in steps for i in members) == list(range(len(seconds)))
    assert all(steps) and len(steps) == len(plan)
    for members in steps:
        longest = max(plan.durations[i] for i in members)
        assert len(members) == 1 or longest * len(members) <= step * (1 + 1e-5)


@settings(max_examples=150, deadline=None)
@given(durations, st.floats(30, 100), st.floats(1, 600), st.integers(1, 9),
       st.one_of(st.none(), st.integers(1, 5)), st.sampled_from([0, 0.32]))
def test_shares_of_a_step_are_all_of_it_and_fit(seconds, most, step, world, utts, rounded):
    plan = Plan(seconds, Batching(most, step, max_batch_utterances=utts), round_seconds=rounded)
    epoch = plan.epoch(1)
    for i in range(min(len(epoch), 3)):
        shares = [epoch.share(i, rank, world) for rank in range(world)]
        counts = {len(share) for share in shares}
        assert len(counts) == 1 and counts.pop() >= 1
        parts = [part for share in shares for part in share]
        assert sorted(np.concatenate(parts).tolist()) == sorted(epoch.step(i).tolist())
        for part in parts:
            assert part.dtype == np.int64 and len(part) <= (utts or len(part))
            assert not len(part) or plan.durations[part].max() * len(part) <= most * (1 + 1e-5)


@settings(max_examples=150, deadline=None)
@given(durations, st.floats(30, 100), st.floats(1, 600), st.integers(1, 9),
       st.one_of(st.none(), st.integers(7, 9)), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 50)))
def test_micro_batches_of_the_same_steps_fit_into_few_shapes(seconds, most, step, world, utts, least,
                                                             buckets):
    most = max(most, 5 * max(seconds))
    batching = Batching(most, step, buckets=buckets, max_batch_utterances=utts, min_batch_utterances=least)
    if len(seconds) < least:
        return
    plain, plan, tokens = Plan(seconds, batching), Plan(seconds, batching), np.arange(len(seconds)) % 7
    plan.pad_to_shapes(tokens)
    assert steps_of(plan, 2) == steps_of(plain, 2)
    epoch, shapes = plan.epoch(2), set()
    for i in range(len(epoch)):
        shape = epoch.shape(i, world)
        shares = [epoch.share(i, rank, world) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1 and len(shares[0]) >= 1
        parts = [part for share in shares for part in share if len(part)]
        assert sorted(np.concatenate(parts).tolist()) == sorted(epoch.step(i).tolist())
        for part in parts:
            assert least <= len(part) <= shape.rows <= (utts or len(seconds))
            assert plan.durations[part].max() <= shape.seconds and tokens[part].max() <= shape.tokens
        assert shape.rows * shape.seconds <= 1.05 * most * (1 + 1e-5)
        shapes.add(shape)
    assert len(shapes) <= MAX_SHAPES


@pytest.mark.parametrize("step, world, most", [(500, 1, 0.05), (4000, 1, 0.05), (4000, 8, 0.056)])
def test_few_shapes_of_700_hours_have_little_padding(step, world, most):
    # Common Voice: a mean of 5.3 s, 5 % below 3.0 s and 5 % above 8.6 s
    seconds = np.clip(np.random.default_rng(0).lognormal(np.log(5.3) - 0.37**2 / 2, 0.37, 480_000), 1.2, 20)
    plain, plan = (Plan(seconds.astype(np.float32), Batching(500, step), round_seconds=0.16) for _ in range(2))
    plan.pad_to_shapes()
    epoch, same, padded, shapes = plan.epoch(1), plain.epoch(1), 0.0, set()
    for i in range(len(epoch)):
        assert np.array_equal(epoch.step(i), same.step(i))
        shape = epoch.shape(i, world)
        padded += world * len(epoch.micro_batches(i, 0, world)) * shape.rows * shape.seconds
        shapes.add(shape)
    assert len(shapes) <= 32 and 1 - seconds.sum() / padded < most


def test_micro_batches_are_no_more_than_needed():
    plan = Plan(corpus(), Batching(max_batch_seconds=50, step_seconds=400))
    epoch = plan.epoch(1)
    assert {len(epoch.share(i, 0, 8)) for i in range(len(epoch))} <= {1, 2}
    assert {len(epoch.share(i, 0, 16)) for i in range(len(epoch))} == {1}
    for i in range(len(epoch)):
        padded = plan.durations[epoch.step(i)].max() * len(epoch.step(i))
        assert len(epoch.share(i, 0, 1)) <= padded / 50 * 1.1 + 1


def test_ranks_have_about_the_same_to_do():
    plan = Plan(corpus(20000), Batching(max_batch_seconds=100, step_seconds=1600))
    epoch, worst = plan.epoch(1), []
    for i in range(0, len(epoch), 3):
        shares = [epoch.share(i, rank, 16) for rank in range(16)]
        cost = [sum(plan.durations[part].max(initial=0) * len(part) for part in share) for share in shares]
        worst.append(max(cost) / np.mean(cost))
    assert np.mean(worst) < 1.08


def test_every_epoch_has_other_steps_in_another_order_and_repeats_itself():
    plan, again = Plan(corpus(), Batching(100)), Plan(corpus(), Batching(100))
    epochs = [steps_of(plan, epoch) for epoch in (1, 2, 3, 4)]
    assert epochs == [steps_of(again, epoch) for epoch in (1, 2, 3, 4)]
    for a in range(4):
        for b in range(a):
            assert epochs[a] != epochs[b]
            together = [{frozenset(step) for step in epochs[e]} for e in (a, b)]
            assert len(together[0] & together[1]) < 0.1 * len(epochs[a])  # members change company
            lengths = [[max(plan.durations[step]) for step in epochs[e]] for e in (a, b)]
            assert abs(np.corrcoef(*lengths)[0, 1]) < 0.3  # and the order of buckets changes
    assert steps_of(Plan(corpus(), Batching(100, seed=2)), 1) != epochs[0]


def test_a_short_run_goes_through_the_corpus_several_times_in_an_epoch():
    seconds = corpus(60)
    once = Plan(seconds, Batching(100), epochs=3)
    again = Plan(seconds, Batching(100, min_steps=200), epochs=3)
    assert once.passes == 1 < again.passes and 200 <= 3 * len(again) < 200 + 3 * len(once)
    assert len(again) == again.passes * len(once)
    for epoch in (1, 2, 3):
        made = again.epoch(epoch)
        assert len(made) == len(again)
        for number in range(again.passes):
            steps = range(number * len(once), (number + 1) * len(once))
            drawn = np.concatenate([made.step(i) for i in steps])
            assert sorted(drawn.tolist()) == list(range(60))  # each time everything once, as a separate epoch would
            visit = again.passes * (epoch - 1) + number + 1
            micro_batches = [places for i in steps for places in made.micro_batches(i)]
            assert {number for places in micro_batches for number in made.pass_numbers(places)} == {visit}
            assert [made.step(i).tolist() for i in steps] == steps_of(once, visit)


def test_a_run_has_its_min_steps_and_not_one_pass_more():
    steps = 2 * len(Plan(corpus(60), Batching(100)))
    for least, passes in ((steps, 1), (steps + 1, 2), (2 * steps, 2)):
        assert Plan(corpus(60), Batching(100, min_steps=least), epochs=2).passes == passes


def test_steps_depend_on_neither_micro_batches_nor_what_a_device_holds():
    options = ((50, 4), (400, None))
    plans = [Plan(corpus(), Batching(most, 400, max_batch_utterances=utts)) for most, utts in options]
    assert steps_of(plans[0], 3) == steps_of(plans[1], 3)


def test_a_step_is_asked_for_without_those_before_it():
    plan = Plan(corpus(), Batching(100))
    whole, later = plan.epoch(2), plan.epoch(2)
    for i in (len(plan) - 1, 0, len(plan) // 2):
        assert later.step(i).tolist() == whole.step(i).tolist()
        for part, same in zip(later.share(i, 1, 2), whole.share(i, 1, 2), strict=True):
            assert part.tolist() == same.tolist()


def test_rounded_durations_make_few_shapes_and_no_more_steps():
    seconds, batching = corpus(30000), Batching(100)
    shapes, padded = [], []
    for rounded in (0, 0.32):
        plan = Plan(seconds, batching, round_seconds=rounded)
        epoch = plan.epoch(1)
        steps = [epoch.step(i) for i in range(len(epoch))]
        shapes.append({(len(step), round(float(plan.durations[step].max()), 3)) for step in steps})
        padded.append(sum(len(step) * float(plan.durations[step].max()) for step in steps))
        if rounded:
            units = [(width, 0.32 if width >= 2.56 else 0.16 if width >= 1.28 else 0.08) for _, width in shapes[-1]]
            assert all(abs(width / unit - round(width / unit)) < 1e-2 for width, unit in units)
    assert 5 * len(shapes[1]) < len(shapes[0]) and padded[1] < 1.06 * padded[0]


def padding_share(plan):
    """The share of padding in an epoch whose steps are one batch each."""
    padded = sum(float(plan.durations[step].max()) * len(step) for step in steps_of(plan, 1))
    return 1 - plan.durations.sum(dtype=float) / padded


def test_little_is_padding_and_steps_are_full():
    plan = Plan(corpus(30000), Batching(100))
    assert padding_share(plan) < 0.03
    assert np.mean([plan.durations[step].max() * len(step) for step in steps_of(plan, 1)]) > 0.85 * 100


@pytest.mark.parametrize("utterances, most_steps", [(1000, 40), (3000, 60), (10_000, 225)])
def test_small_corpora_pad_little_in_few_steps(utterances, most_steps):
    """Common Voice's durations, 300 s a step: SpeechBrain's sampler pads 2.2 to 2.3 % in 59, 94 and 218 batches."""
    rng = np.random.default_rng(0)
    seconds = np.clip(rng.lognormal(1.5, 0.45, utterances), 0.8, 20)
    plan = Plan(seconds, Batching(300))
    assert padding_share(plan) < 0.0222 and len(plan) <= most_steps


def test_a_corpus_of_a_few_steps_keeps_them_full():
    assert len(Plan(np.linspace(2, 20, 40), Batching(300))) == 3  # of 15 at 20 s each
    assert len(Plan([2.0, 4.0, 6.0, 8.0], Batching(100))) == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 4))
def test_edges_cost_least(seconds, buckets):
    plan = Plan(np.array(seconds, dtype=float), Batching(40, buckets=buckets))

    def cost(edges):
        return sum(min(edge for edge in edges if edge >= value) for value in seconds)

    values = sorted(set(seconds))
    best = min(cost((*edges, values[-1])) for edges in itertools.combinations(
        values[:-1], min(buckets, len(values)) - 1))
    assert len(plan.edges) <= buckets and cost(plan.edges.tolist()) == best


@pytest.mark.parametrize("sort, direction", [("ascending", 1), ("descending", -1)])
def test_the_first_epoch_can_be_sorted(sort, direction):
    plan = Plan(corpus(), Batching(100, sort=sort))
    for epoch in (1, 2):
        longest = [plan.durations[step].max() for step in steps_of(plan, epoch)]
        buckets = np.searchsorted(plan.edges, longest).tolist()
        ascending = all(a * direction <= b * direction for a, b in itertools.pairwise(buckets))
        assert ascending == (epoch == 1)


@settings(max_examples=200, deadline=None)
@given(durations, st.floats(1, 600), st.integers(1, 9), st.integers(2, 5), st.integers(0, 9),
       st.one_of(st.none(), st.integers(9, 12)), st.sampled_from([0, 0.32]))
@pytest.mark.slow
def test_no_micro_batch_has_fewer_utterances_than_asked_for(seconds, step, world, least, room, utts,
                                                            rounded):
    most = (2 * least - 1) * max(seconds) + room
    batching = Batching(most, step, min_batch_utterances=least, max_batch_utterances=utts)
    if len(seconds) < least:
        with refused("impossible-batching", wording=False):
            Plan(seconds, batching)
        return
    plan = Plan(seconds, batching, round_seconds=rounded)
    epoch = plan.epoch(1)
    steps = steps_of(plan, 1)
    assert sorted(i for members in steps for i in members) == list(range(len(seconds)))
    for i, members in enumerate(steps):
        longest = max(plan.durations[i] for i in members)
        assert len(members) >= least and (len(members) < 2 * least or longest * len(members) <= step * (1 + 1e-5))
        shares = [epoch.share(i, rank, world) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1
        parts = [part for share in shares for part in share if len(part)]
        assert sorted(np.concatenate(parts).tolist()) == sorted(members)
        for part in parts:
            assert least <= len(part) <= (utts or len(part))
            assert plan.durations[part].max() * len(part) <= most * (1 + 1e-5)


def steps_by_counting(counts, labels_per_step, clips):
    """The most steps of so many labels that groups of so many clips can fill, tried one after the other."""
    steps = 0
    while sum(min(count // clips, steps + 1) for count in counts) >= labels_per_step * (steps + 1):
        steps += 1
    return steps


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=12), st.integers(1, 5), st.integers(2, 6), st.integers(1, 4),
       st.integers(1, 3), st.integers(1, 30), st.sampled_from([0, 0.16, 0.32]))
def test_each_step_has_as_many_clips_of_as_many_labels_on_any_ranks(counts, clips, wanted, world, at_most, epoch,
                                                                    rounded):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    seconds = np.full(len(labels), 0.5)
    batching = Batching(6, 0.5 * clips * wanted, max_batch_utterances=clips * at_most, clips_per={"speaker": clips})
    if sum(count >= clips for count in counts) < wanted:
        with refused("impossible-batching", wording=False):
            Plan(seconds, batching, labels=labels)
        return
    plan = Plan(seconds, batching, labels=labels, round_seconds=rounded)
    steps = steps_of(plan, epoch)
    assert len(steps) == len(plan) == steps_by_counting(counts, wanted, clips)
    drawn = [i for members in steps for i in members]
    assert len(set(drawn)) == len(drawn)
    for number, members in enumerate(steps):
        groups = labels[members].reshape(wanted, clips)
        assert (groups == groups[:, :1]).all() and len(set(groups[:, 0].tolist())) == wanted
        parts = [part for rank in range(world) for part in plan.epoch(epoch).share(number, rank, world)]
        assert sorted(np.concatenate(parts).tolist()) == sorted(members)
        assert all((labels[part].reshape(-1, clips) == labels[part].reshape(-1, clips)[:, :1]).all() for part in parts)


def test_labels_are_drawn_anew_in_each_epoch_and_none_is_left_out_for_good():
    draw = np.random.default_rng(1)
    labels, seconds = draw.integers(0, 30, 700), draw.uniform(1, 3, 700)
    batching = Batching(60, 120, clips_per={"speaker": 4})
    plan, again = (Plan(seconds, batching, labels=labels) for _ in range(2))
    epochs = [steps_of(plan, epoch) for epoch in range(1, 30)]
    assert epochs[6] == steps_of(again, 7)
    assert not any(epochs[0] == other for other in epochs[1:])
    drawn = np.bincount([i for steps in epochs for members in steps for i in members], minlength=700)
    assert drawn.min() > 15, "each is drawn in most epochs"
    together = [len({labels[i] for i in members}) for steps in epochs for members in steps]
    assert set(together) == {10}
    longer = Batching(60, 120, clips_per={"speaker": 4}, min_steps=3 * len(plan))
    twice = Plan(seconds, longer, labels=labels, epochs=2)
    assert twice.passes == 2 and len(twice) == 2 * len(plan)
    for number in (0, 1):
        made = twice.epoch(1)
        assert [made.step(number * len(plan) + i).tolist() for i in range(len(plan))] == steps_of(plan, number + 1)


def labelled(*batching, **options):
    """A plan of seven seconds, of two values with three clips and one with one."""
    return Plan(np.ones(7), Batching(*batching, **options), labels=np.array([0, 0, 0, 1, 1, 1, 2]))


def test_a_column_of_labels_that_is_not_there_is_named():
    train = Manifest(ids=["a"], durations=[1.0], wavs=["a"], texts=[""], speakers=["x"])
    with refused("missing-column"):
        Plan.of(train, Batching(10, clips_per={"mood": 2}), None, 1)
    assert labelled(10, 4, clips_per={"speaker": 2}).sampler.left_out == 1


@pytest.mark.parametrize("unit", [0.32, 0.16])
def test_short_clips_are_rounded_by_less(unit):
    """Clips of 0.44 s were padded by 28 % when all were rounded to multiples of 0.32 s."""
    seconds = np.clip(np.random.default_rng(0).normal(0.44, 0.08, 3000), 0.25, 0.7)
    plan = Plan(seconds, Batching(20, 20), round_seconds=unit)
    steps = [(len(step), float(plan.durations[step].max())) for step in steps_of(plan, 1)]
    assert 1 - seconds.sum() / sum(count * width for count, width in steps) < 0.07
    assert len({round(width, 3) for _, width in steps}) <= 14


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_what_is_longer_is_rounded_to_no_less(a, b):
    low, high = sorted((a, b))
    rounded = [float(np.ceil(each / unit_of(each, 0.32) - 1e-4) * unit_of(each, 0.32)) for each in (low, high)]
    assert rounded[0] <= rounded[1] * (1 + 1e-6) and low * (1 - 1e-3) <= rounded[0] <= low * 1.126 + 0.32 * (low > 2.56)


@pytest.mark.parametrize(("make", "code"), [
    (lambda: Plan([1.0, 12.0], Batching(10), ids=["clip3", "clip7"]), "clip-too-long"),
    (lambda: Plan([20.0] * 8, Batching(10)), "clip-too-long"),
    *((lambda wrong=wrong: Plan([1.0, wrong], Batching(10)), "damaged-preparation")
      for wrong in (0.0, -1.0, float("nan"), float("inf"))),
    (lambda: Plan([], Batching(10)), "no-utterances"), (lambda: Batching(10, 0), "bad-value"),
    (lambda: Batching("120 s"), "bad-value"), (lambda: Batching(10, sort="length"), "bad-value"),
    *((lambda name=name, wrong=wrong: Batching(10, **{name: wrong}), "bad-value")
      for name, wrong in (("buckets", 2.0), ("max_batch_utterances", 1.5), ("buckets", True), ("seed", "one"),
                          ("step_seconds", [30]))),
    (lambda: Plan([2.0, 8.0, 3.0], Batching(20, min_batch_utterances=2), ids=["a", "long", "c"]),
     "impossible-batching"),
    (lambda: Plan([2.0, 8.0, 3.0], Batching(30, min_batch_utterances=2, max_batch_utterances=2)),
     "impossible-batching"),
    (lambda: labelled(10, 10, clips_per={"speaker": 2}), "impossible-batching"),
    (lambda: labelled(10, 2, clips_per={"speaker": 2}), "impossible-batching"),
    (lambda: labelled(10, 10, clips_per={"mood": 9}), "impossible-batching"),
    (lambda: labelled(3, 10, clips_per={"speaker": 4}), "impossible-batching"),
    *((lambda wrong=wrong: Batching(10, clips_per=wrong), "bad-value")
      for wrong in ("speaker", {}, {"speaker": 2, "mood": 2}, 4)),
    (lambda: Batching(10, clips_per={"speaker": 1.5}), "bad-value"),
    (lambda: Batching(10, clips_per={"speaker": 2}, sort="ascending"), "conflicting-options")])
def test_mistakes_are_named(make, code):
    with refused(code):
        make()


@pytest.mark.slow
def test_two_million_utterances_are_planned_in_3_seconds_and_1_gb():
    code = """
import re, time
import numpy as np
from sbkit.data.plan import Batching, Plan, unit_of
from sbkit.data.shapes import MAX_SHAPES
seconds = np.clip(np.random.default_rng(0).lognormal(1.5, 0.45, 2_000_000), 0.8, 30).astype(np.float32)
start = time.process_time()  # of this process alone, however busy the machine is
epoch = Plan(seconds, Batching(200, 1600)).epoch(5)
epoch.share(len(epoch) - 1, 7, 8)
print(time.process_time() - start, re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, kilobytes = map(float, out.stdout.split())
    assert seconds < 3 and kilobytes < 1e6


@pytest.mark.parametrize("given, device, compiled, expected", [
    (None, "cpu", False, 0.32), (None, "cuda", False, 0.16), (None, "cuda", True, 0.32), (0, "cpu", False, 0),
    (0.5, "cuda", False, 0.5)])
def test_shapes_are_rounded_where_that_saves_time_or_as_asked(given, device, compiled, expected):
    assert Batching(120, 30, round_seconds=given).rounding(device, compiled) == expected


def test_a_micro_batch_that_is_measured_is_at_most_a_step_and_needs_one():
    batching = Batching(max_batch_seconds="auto", step_seconds=30)
    assert batching.auto and batching.max_batch_seconds == 30 and not Batching(max_batch_seconds=30).auto
    with refused("impossible-batching"):
        Batching(max_batch_seconds="auto")
    with refused("bad-value"):
        Batching(max_batch_seconds="all", step_seconds=30)
