"""Who doesn't learn is told so, once, with what to try; who does is left in peace, and so is who is merely late."""

from __future__ import annotations

import math
import random
import re

import pytest

from sbkit.tasks.hearing import Hearing
from sbkit.tasks.learning_alarm import LearningAlarm
from sbkit.tasks.learning_notice import Setup
from sbkit.train.schedule import Schedule

CHANCE, PLAIN = 2.83, Setup()


class Trial:
    """A run as the alarm sees it: a loss per step, a learning rate, now and then a validation."""

    def __init__(self, steps: int, loss, cer=None, chance: float = CHANCE, rate: float = 0.002, warmup: float = 50,
                 every: int = 40, rows: int = 20, setup: Setup = PLAIN, cut: int | None = None,
                 folder=None, comparable: bool = True, planned: int | None = None, rise: float | None = None):
        self.hearing, self.alarm, self.told = Hearing(chance), LearningAlarm("ctc"), []
        self.schedule = Schedule(rate, warmup, "linear", rise=rise)
        self.schedule.total_steps = steps
        capped = self.schedule.top()[1] < rate
        self.setup = setup._replace(planned=steps if planned is None else planned, peak=rate,
                                    rise=rise if capped else None)
        self._prepare()
        noise = random.Random(7)
        for step in range(1, steps + 1):
            self.look(step)
            self.hearing.count(step, loss(step) + noise.gauss(0, 0.04), 1.0, comparable)
            if cer is not None and step % every == 0:
                empty = rows if cer(step) == 100 else 0
                self.told += self.alarm.validated(step, empty, rows, cer(step))
            if step == cut:
                self._resume(folder)
        self.look(steps + 1)
        if cut == steps:  # a run that was killed when all was trained
            self._resume(folder)
            self.look(steps + 1)
        self.told += self.alarm.end(steps)

    def _prepare(self):
        self.alarm.setup = self.setup

    def look(self, step: int) -> None:
        self.hearing.at(step)
        self.told += self.alarm.look(step, self.hearing, self.schedule(step))

    def _resume(self, folder) -> None:
        saved = (self.hearing, self.alarm)
        self.hearing, self.alarm = Hearing(self.hearing.chance), LearningAlarm("ctc")
        for before, after, name in zip(saved, (self.hearing, self.alarm), "ha", strict=True):
            before._save(folder / name)
            after._load(folder / name, True)
        self._prepare()

    @property
    def short(self) -> list[tuple]:
        return [(each.what, each.step, "end" if each.at_end else "on" if each.holds else "over") for each in self.told]


def healthy(leaves: int = 150, chance: float = CHANCE, falls: float = 250, floor: float = 0.3):
    """A loss that comes down to chance within some dozens of steps, stands there, and leaves."""
    def loss(step: int) -> float:
        plateau = chance * (1.01 + 4 * math.exp(-step / 8)) - 0.03 * min(1, step / 150)
        return plateau if step < leaves else plateau * max(floor, math.exp(-(step - leaves) / falls))
    return loss


def cer_of(loss, chance: float = CHANCE):
    return lambda step: 100.0 if loss(step) > 0.93 * chance else 100 * max(0.05, loss(step) / chance - 0.2)


# ---------------------------------------------------------------- left in peace


@pytest.mark.parametrize("leaves", [90, 150, 230, 400])
@pytest.mark.parametrize("chance", [CHANCE, 5.9], ids=["characters", "pieces"])
@pytest.mark.parametrize("warmup", [50, 300])
def test_a_run_that_learns_is_told_nothing(leaves, chance, warmup):
    loss = healthy(leaves, chance)
    assert not Trial(900, loss, cer_of(loss, chance), chance, warmup=warmup).told


def test_while_the_rate_still_rises_nothing_is_told_however_long_that_takes():
    trial = Trial(8000, healthy(leaves=7000), warmup=6800)
    assert not trial.told


def test_a_lower_rate_may_take_longer():
    assert not Trial(1400, healthy(leaves=1000), rate=0.0007).told
    assert Trial(1400, healthy(leaves=1000)).short[0] == ("chance", 449, "on")


def test_a_run_from_trained_weights_may_be_short():
    assert not Trial(40, lambda step: 0.6, planned=40).told


def test_a_loss_that_masks_make_harder_again_has_not_diverged():
    loss = healthy(leaves=100, falls=60)
    assert not Trial(900, lambda step: loss(step) + (0.5 if step > 400 else 0)).told


def test_a_spike_passes():
    loss = healthy(leaves=100, falls=60)
    assert not Trial(900, lambda step: 6.0 if 500 <= step < 520 else loss(step)).told


def test_where_chance_is_not_known_nothing_is_said_of_it():
    assert not Trial(900, healthy(leaves=9999), chance=math.nan).told
    assert not Trial(900, healthy(leaves=9999), comparable=False).told, "another loss"


# ---------------------------------------------------------------- told


def test_a_loss_that_stands_at_chance_is_told_once_and_again_at_the_end():
    trial = Trial(700, healthy(leaves=9999), lambda step: 100.0, setup=Setup(masks=True))
    assert trial.short == [("chance", 449, "on"), ("chance", 700, "end")]
    first, text = trial.told[0], trial.told[0].text()
    assert text.startswith("Step 449: the model hears nothing: its loss stands at chance. The ctc loss is 2.8")
    assert "(2.83: guessing by how often each token comes)" in text
    assert "In the last validation (step 440) 20 of 20 transcripts are empty, CER 100.0 %" in text
    assert "Runs from nothing that learn leave chance after 100 to 230 steps" in text
    assert "has done 449, 400 of them since" in text
    assert [advice.split(":")[0] for advice in first.advice[:3]] == [
        "a longer warm-up", "a third of the learning rate", "masks that wait until something is heard"]
    assert "--lr 0.00067" in text and "--schedule.warmup 150" in text and "--spec_augment null" in text
    assert trial.told[1].text().startswith("At the end of training: the model hears nothing")
    assert "--spec_augment" not in Trial(700, healthy(leaves=9999)).told[0].text(), "where nothing is masked"


def test_a_run_that_was_too_short_is_told_first_of_all_to_take_more_steps():
    told = Trial(300, healthy(leaves=9999)).told
    assert [(each.what, each.at_end) for each in told] == [("chance", True)]
    assert told[0].headline == "The model has heard nothing yet" and told[0].advice[0].startswith("more steps")


def test_a_plan_of_too_few_steps_is_told_at_once():
    trial = Trial(50, healthy(leaves=9999), warmup=0.1)
    assert trial.short == [("chance", 3, "on"), ("chance", 50, "end")]
    assert trial.told[0].headline == "This run is planned for 50 steps, too few to hear anything"
    assert "--least_steps 1000" in trial.told[0].text()


def test_a_rate_of_nearly_nothing_is_told_to_be_higher_and_waits_no_longer_for_it_than_for_a_low_one():
    trial = Trial(1400, lambda step: 9.0, rate=1e-6)
    assert trial.short == [("chance", 1249, "on"), ("chance", 1400, "end")]
    assert "not even come down to chance" in trial.told[0].headline
    assert trial.told[0].advice[0].startswith("a higher learning rate: --lr 0.002")


@pytest.mark.parametrize(("warmup", "rise", "reason"), [
    (0.2, 1.25e-5, ", since it may rise by 1.25e-05 a step (--schedule.rise)"), (500, None, "")])
def test_a_run_too_short_for_its_rate_is_told_to_take_more_steps_and_no_rate_that_is_set_already(warmup, rise, reason):
    (told,) = Trial(12, lambda step: 9.0, warmup=warmup, rise=rise, planned=70).told
    assert told.at_end and told.advice[0].startswith("more steps: --least_steps 1000 or more")
    assert re.search(r"the learning rate has come to \S+ of 0.002" + re.escape(reason) + "$", told.advice[0])
    assert "--lr" not in told.text() and "--schedule.warmup" not in told.text()


def test_a_warm_up_of_some_steps_and_a_fraction_has_come_to_its_rate():
    told = Trial(300, healthy(leaves=9999), warmup=0.0217, rise=1.0).told[0]
    assert told.advice[1] == "a longer warm-up: --schedule.warmup 150"


def test_more_steps_are_more_than_there_were():
    assert "--least_steps 6200 or more" in Trial(700, healthy(leaves=9999), planned=3001).told[0].text()


@pytest.mark.parametrize("trained", ["pretrainer", "init_from"])
def test_what_was_seen_of_runs_from_nothing_is_not_said_of_one_from_trained_weights(trained):
    setup = Setup(trained=trained)
    text = Trial(1400, healthy(leaves=9999), setup=setup, rate=3e-4).told[0].text()
    assert "100 to 230" not in text and "0.002" not in text
    assert f"It starts from trained weights ({trained}), and after how many steps such runs leave" in text
    assert ("docs/finetune.md" in text) == (trained == "pretrainer")
    short = Trial(50, healthy(leaves=9999), warmup=0.1, setup=setup).told[0]
    assert short.headline == "This run is planned for 50 steps, and hears nothing at its start"


@pytest.mark.parametrize(("rate", "advised"), [(5e-5, None), (1e-6, "--lr 0.0003 (its peak is 1e-06; others' runs")])
def test_a_low_rate_is_one_for_a_trained_encoder_unless_it_is_lower_than_any_that_others_had(rate, advised):
    told = Trial(1400, lambda step: 9.0, rate=rate, setup=Setup(trained="pretrainer")).told[0]
    assert told.advice[0].startswith(f"a higher learning rate: {advised}" if advised else "a longer warm-up")
    assert "--lr 0.002" not in told.text()


def test_who_learns_late_is_told_that_it_is_over_and_not_accused_at_the_end():
    trial = Trial(1200, healthy(leaves=600))
    assert [(what, how) for what, _, how in trial.short] == [("chance", "on"), ("chance", "over")]
    assert "The warning of step 449 is over" in trial.told[1].text()


@pytest.mark.parametrize("setup", [Setup(), Setup(averages=True)])
def test_a_validation_that_stays_blank_while_training_hears_is_told(setup):
    trial = Trial(900, healthy(), lambda step: 97.0 if step < 700 else 60.0, setup=setup)
    assert trial.short == [("validation", 480, "on"), ("validation", 720, "over")]
    assert trial.told[0].headline == "Validation hears nothing, though training does"
    assert ("--ema_decay" in trial.told[0].text()) == setup.averages
    assert Trial(900, healthy(), lambda step: 97.0).short[-1] == ("validation", 900, "end")


def test_blank_validations_are_told_where_chance_is_not_known():
    trial = Trial(900, healthy(), lambda step: 100.0, chance=math.nan)
    assert trial.short == [("validation", 480, "on"), ("validation", 900, "end")]
    assert trial.told[0].headline == "Validation hears nothing" and "chance" not in trial.told[0].detail


def test_a_validation_of_which_nearly_all_is_empty_is_blank_whatever_its_rate():
    alarm = LearningAlarm()
    assert not alarm.validated(100, 20, 20, 90.0), "too early"
    assert alarm.validated(500, 19, 20, 90.0) and not LearningAlarm().validated(500, 18, 20, 90.0)
    assert not LearningAlarm().validated(500, 0, 0, 100.0), "nothing was validated"


def test_what_is_lost_after_it_was_heard_is_told_as_divergence():
    loss = healthy(leaves=100, falls=60)
    trial = Trial(900, lambda step: 2.5 if step > 500 else loss(step), setup=Setup(max_norm=5.0))
    assert [(what, how) for what, _, how in trial.short] == [("divergence", "on"), ("divergence", "end")]
    assert 550 < trial.told[0].step < 600
    text = trial.told[0].text()
    assert re.search(r"13 % below chance .*\. At its best, after step (2|3|4)\d\d, it was 7\d % below", text)
    assert "--lr 0.00067" in text and "--max_grad_norm 1 (now 5)" in text


def test_a_loss_that_grows_is_told_from_chance_and_where_chance_is_not_known():
    def explodes(step):
        return 2.9 if step < 200 else 30.0
    for chance, began in ((CHANCE, "; chance is 2.83."), (math.nan, "; it was 2.89 in the first steps.")):
        trial = Trial(400, explodes, chance=chance)
        assert [(what, how) for what, _, how in trial.short] == [("divergence", "on"), ("divergence", "end")]
        assert began in trial.told[0].detail


def test_who_finds_back_is_told_so():
    loss = healthy(leaves=100, falls=60)
    trial = Trial(900, lambda step: 2.8 if 500 < step < 620 else loss(step))
    assert [(what, how) for what, _, how in trial.short] == [("divergence", "on"), ("divergence", "over")]


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("cut", [1, 3, 30, 449, 450, 480, 550, 700])
@pytest.mark.parametrize("kind", ["stands", "late", "loses", "blank"])
def test_a_run_that_was_resumed_is_told_what_one_never_stopped_is(cut, kind, tmp_path):
    def curve(step):
        if kind == "loses":
            return 2.6 if step > 480 else healthy(leaves=100, falls=60)(step)
        return healthy({"stands": 9999, "late": 520, "blank": 150}[kind])(step)
    cer = (lambda step: 100.0) if kind == "blank" else None
    whole = Trial(700, curve, cer)
    assert whole.told and Trial(700, curve, cer, cut=cut, folder=tmp_path).told == whole.told


def test_a_run_that_goes_on_from_a_checkpoint_without_an_alarm_waits_anew():
    alarm, hearing = LearningAlarm("ctc"), Hearing(CHANCE)
    for step in range(5000, 5300):
        hearing.count(step, CHANCE, 1.0)
        hearing.at(step)
        assert not alarm.look(step, hearing, 0.002)
