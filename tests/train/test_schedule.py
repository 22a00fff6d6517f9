"""The learning rate is a function of the step, and of what is heard where it says so."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from speechbrain.nnet import schedulers

from sbkit.train.schedule import LIFTED, Schedule
from sbkit.train.speechbrain_schedules import Annealing, SpeechBrainScheduler


@pytest.mark.parametrize("shape, slow", [("cosine", 0.5 ** 0.5), ("linear", 0.5)])
def test_up_to_the_peak_and_down_to_the_end(shape, slow):
    """A cosine stays near its ends for longer: a quarter of the way it is so far from the middle."""
    schedule = Schedule(peak=2.0, warmup=10, shape=shape, final=0.1)
    schedule.total_steps = 110
    assert schedule(5) == pytest.approx(1.0)
    assert schedule(10) == pytest.approx(2.0)
    assert schedule(35) == pytest.approx(1.1 + 0.9 * slow)
    assert schedule(60) == pytest.approx(1.1)
    assert schedule(85) == pytest.approx(1.1 - 0.9 * slow)
    assert schedule(110) == pytest.approx(0.2)


@given(step=st.integers(1, 10_000), warmup=st.floats(0.001, 0.9), shape=st.sampled_from(["cosine", "linear", "noam"]))
def test_never_above_the_peak_nor_below_zero(step, warmup, shape):
    schedule = Schedule(peak=1.0, warmup=warmup, shape=shape)
    schedule.total_steps = 1000
    assert 0 <= schedule(step) <= 1.0


@pytest.mark.parametrize("peak, warmup, rise, end, top", [
    (6.0, 0.1, 0.02, 300, 6.0), (60.0, 0.1, 0.02, 500, 10.0),  # reached later, or lowered as half the run is too short
    (1.0, 0.2, 0.01, 200, 1.0), (1.0, 3, 0.01, 3, 1.0)])  # gentle as it is, or in steps that the recipe has chosen
def test_a_high_peak_is_reached_later_or_lowered_and_others_stay(peak, warmup, rise, end, top):
    schedule = Schedule(peak=peak, warmup=warmup, shape="linear", max_rise_per_step=rise)
    schedule.total_steps = 1000
    assert schedule.limits_warmup == (peak > 1) and schedule.warmup_end() == pytest.approx((end, top))
    middle = (1000 + end) // 2
    assert [schedule(step) for step in (end, 1000)] == pytest.approx([top, 0.0])
    assert schedule(middle) == pytest.approx(top / 2, rel=0.01) and max(map(schedule, range(1, 1001))) <= top + 1e-9


@given(peak=st.floats(1e-5, 1), warmup=st.floats(0.01, 0.9), rise=st.floats(1e-6, 1e-2),
       total=st.integers(1, 2000), shape=st.sampled_from(["cosine", "linear", "noam", "constant"]))
def test_no_step_rises_by_more(peak, warmup, rise, total, shape):
    schedule = Schedule(peak=peak, warmup=warmup, shape=shape, max_rise_per_step=rise)
    schedule.total_steps = total
    rates = [0.0, *map(schedule, range(1, total + 1))]
    assert max(after - before for before, after in itertools.pairwise(rates)) <= rise * (1 + 1e-6)
    assert max(rates) <= peak * (1 + 1e-9)


def test_the_rate_is_limited_while_the_loss_is_at_chance():
    schedule, optimizer = limited(peak=0.003, max_lr_at_chance=0.002)
    found = []
    for score in (0.0, 0.1, 0.25, 0.4, 1.0):
        schedule.set_score(score)
        found.append(schedule.apply(optimizer, 100))
    assert found == pytest.approx([0.002, 0.002, 0.0025, 0.003, 0.003])
    schedule.set_score(0.0)
    assert schedule.apply(optimizer, 10) == schedule(10) < 0.002, "it is a limit, not a rate"
    assert optimizer.param_groups[0]["lr"] == schedule(10)


@given(peak=st.floats(1e-5, 1), max_lr_at_chance=st.none() | st.floats(1e-5, 1), step=st.integers(1, 1000),
       scores=st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted))
def test_a_better_score_never_lowers_the_rate(peak, max_lr_at_chance, step, scores):
    schedule, optimizer = limited(peak, max_lr_at_chance)
    rates = []
    for score in scores:
        schedule.set_score(score)
        rates.append(schedule.apply(optimizer, step))
    assert 0 <= rates[0] <= rates[1] <= schedule(step)
    if max_lr_at_chance is None or max_lr_at_chance >= peak or scores[0] >= LIFTED[1]:
        assert rates[0] == schedule(step)
    if max_lr_at_chance is not None and scores[0] <= LIFTED[0]:
        assert rates[0] <= max_lr_at_chance


def limited(peak, max_lr_at_chance):
    schedule = Schedule(peak=peak, warmup=0.1, shape="linear", max_lr_at_chance=max_lr_at_chance)
    schedule.total_steps = 1000
    return schedule, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize("given", [
    {"max_lr_at_chance": 0}, {"max_rise_per_step": 0}, {"peak": -0.1}, {"peak": float("nan")}, {"warmup": -1},
    {"shape": "cos"}], ids=str)
def test_invalid_schedules_are_refused(given):
    with refused("bad-value", key=next(iter(given))):
        Schedule(**{"peak": 1.0, **given})
    assert Schedule(peak=0.0, warmup=0)(1) == 0.0


def test_noam_falls_with_the_square_root():
    schedule = Schedule(peak=1.0, warmup=100, shape="noam")
    assert schedule(400) == pytest.approx(0.5)


def test_groups_keep_their_ratio():
    slow, fast = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [slow], "lr_scale": 0.1}, {"params": [fast]}], lr=1.0)
    Schedule(peak=0.5, warmup=1, shape="constant").apply(optimizer, 7)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.5])


def optimizer(*factors):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr_scale": factor} for factor in factors]
    made = torch.optim.SGD(groups, lr=0.5)
    for group, factor in zip(made.param_groups, factors, strict=True):
        group["lr"] *= factor
    return made


@pytest.mark.parametrize(("kind", "given", "call"), [
    ("NoamScheduler", {"lr_initial": 0.5, "n_warmup_steps": 3}, lambda made, opt, step: made(opt)),
    ("LinearWarmupScheduler", {"initial_value": 0.5, "num_warmup_steps": 2, "num_training_steps": 9},
     lambda made, opt, step: made(opt)),
    ("CyclicCosineScheduler", {"n_warmup_steps": 2, "lr_initial": 0.5, "total_steps": 9},
     lambda made, opt, step: made(opt)),
    ("InverseSquareRootScheduler", {"warmup_steps": 2}, lambda made, opt, step: made(opt)),
    ("CyclicLRScheduler", {"base_lr": 0.1, "max_lr": 0.5, "step_size": 3},
     lambda made, opt, step: made.on_batch_end(opt)),
    ("WarmCoolDecayLRSchedule", {"lr": 0.5, "warmup": 2, "cooldown": 3, "total_steps": 9},
     lambda made, opt, step: made(opt, step)),
    ("TriStageLRSchedule", {"lr": 0.5, "warmup_steps": 2, "hold_steps": 3, "decay_steps": 4, "total_steps": 9},
     lambda made, opt, step: made(opt, step)),
])
def test_a_scheduler_of_speechbrain_is_called_as_its_recipes_do_after_a_step(kind, given, call):
    theirs, ours = (getattr(schedulers, kind)(**given) for _ in range(2))
    assert isinstance(ours, SpeechBrainScheduler)
    by_hand, by_us, annealing = optimizer(1.0), optimizer(1.0, 0.1), Annealing(ours)
    for step in range(1, 10):
        call(theirs, by_hand, step)
        annealing.after_step(by_us, step)
        annealing.after_validation(by_us, 1, 2.0)  # changes nothing
        (expected,) = (group["lr"] for group in by_hand.param_groups)
        assert [group["lr"] for group in by_us.param_groups] == pytest.approx([expected, 0.1 * expected])


@pytest.mark.parametrize(("kind", "given", "call"), [
    ("NewBobScheduler", {"initial_value": 0.5}, lambda made, opt, epoch, loss: made(loss)),
    ("LinearScheduler", {"initial_value": 0.5, "final_value": 0.1, "epoch_count": 4},
     lambda made, opt, epoch, loss: made(epoch)),
    ("StepScheduler", {"initial_value": 0.5, "decay_drop": 2}, lambda made, opt, epoch, loss: made(epoch)),
    ("ReduceLROnPlateau", {"patience": 0, "dont_halve_until_epoch": 1},
     lambda made, opt, epoch, loss: made([opt], epoch, loss)),
])
def test_one_of_epochs_is_called_after_a_validation(kind, given, call):
    theirs, ours = (getattr(schedulers, kind)(**given) for _ in range(2))
    by_hand, by_us, annealing = optimizer(1.0), optimizer(1.0, 0.1), Annealing(ours)
    for epoch, loss in enumerate((3.0, 2.0, 2.5, 2.5), 1):
        schedulers.update_learning_rate(by_hand, call(theirs, by_hand, epoch, loss)[1])
        annealing.after_step(by_us, epoch)  # changes nothing
        annealing.after_validation(by_us, epoch, loss)
        (expected,) = (group["lr"] for group in by_hand.param_groups)
        assert [group["lr"] for group in by_us.param_groups] == pytest.approx([expected, 0.1 * expected])


@pytest.mark.parametrize("other", [torch.nn.Identity(), torch.optim.lr_scheduler.StepLR, 3.0, {}])
def test_what_is_called_otherwise_is_no_scheduler(other):
    assert not isinstance(other, SpeechBrainScheduler)
