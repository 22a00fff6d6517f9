"""A run that stays at chance or diverges gets one notice, with what to try; one that learns none."""

from __future__ import annotations

import math
import random
import re

import pytest

from sbkit.tasks.learning_notices import LearningNotices, Setup
from sbkit.tasks.learning_progress import LearningProgress
from sbkit.train.schedule import Schedule

CHANCE, PLAIN = 2.83, Setup()


class Trial:
    """A run as the notices see it: a loss per step, a learning rate, now and then a validation."""

    def __init__(self, steps: int, loss, cer=None, chance: float = CHANCE, rate: float = 0.002, warmup: float = 50,
                 every: int = 40, rows: int = 20, setup: Setup = PLAIN, cut: int | None = None,
                 folder=None, comparable: bool = True, planned: int | None = None, rise: float | None = None,
                 shape: str = "constant", unheard: float | None = None):
        self.progress, self.notices, self.told = LearningProgress(chance), LearningNotices("ctc"), []
        self.schedule = Schedule(rate, warmup, shape, max_rise_per_step=rise, max_lr_at_chance=unheard)
        self.schedule.total_steps = steps
        self.notices.setup = setup._replace(planned=steps if planned is None else planned, schedule=self.schedule)
        noise = random.Random(7)
        for step in range(1, steps + 1):
            self.look(step)
            self.progress.count(step, loss(step) + noise.gauss(0, 0.04), 1.0, comparable)
            if cer is not None and step % every == 0:
                empty = rows if cer(step) == 100 else 0
                self.notices.validated(step, empty, rows, cer(step))
            if step == cut:
                self._resume(folder)
        self.look(steps + 1)
        if cut == steps:  # a run that was killed when all was trained
            self._resume(folder)
            self.look(steps + 1)
        self.told += self.notices.end()

    def look(self, step: int) -> None:
        score = self.progress.score_at(step)
        self.schedule.set_score(score if self.progress.known else 1.0)
        self.told += self.notices.begin_step(step, self.progress, min(self.schedule(step), self.schedule.limit))

    def _resume(self, folder) -> None:
        saved = (self.progress, self.notices)
        self.progress, self.notices = LearningProgress(self.progress.chance), LearningNotices("ctc")
        self.notices.setup = saved[1].setup
        for before, after, name in zip(saved, (self.progress, self.notices), "ha", strict=True):
            before.save(folder / name)
            after.load(folder / name, True)

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


def told_at_chance(steps: range, rate: float | None, alarm=None, hearing=None):
    """What is told while a loss stands at chance, and the notices that watch."""
    alarm, hearing = alarm or LearningNotices("ctc"), hearing or LearningProgress(CHANCE)
    told = []
    for step in steps:
        hearing.score_at(step)
        told += alarm.begin_step(step, hearing, rate)
        hearing.count(step, CHANCE, 1.0)
    return told, alarm


# ---------------------------------------------------------------- left in peace


@pytest.mark.parametrize("leaves", [90, 150, 230, 450])
@pytest.mark.parametrize("chance", [CHANCE, 5.9], ids=["characters", "pieces"])
@pytest.mark.parametrize("warmup", [50, 0.2])
def test_a_run_that_learns_is_told_nothing(leaves, chance, warmup):
    loss = healthy(leaves, chance)
    assert not Trial(1000, loss, cer_of(loss, chance), chance, warmup=warmup, shape="linear").told


def test_steps_of_a_warm_up_count_by_their_rate():
    """Those of one that takes days are not waited for."""
    assert not Trial(8000, healthy(leaves=2200), warmup=6800).told
    trial = Trial(8000, healthy(leaves=9999), warmup=6800)
    assert trial.short == [("chance", 2331, "on"), ("chance", 8000, "end")]
    assert [advice.split(":")[0][:11] for advice in trial.told[0].advice] == ["more steps", "transcripts"]


def test_a_lower_rate_may_take_longer_and_so_may_one_that_rises_beyond_the_usual_one():
    assert not Trial(1400, healthy(leaves=1000), rate=0.0007).told
    assert not Trial(1000, healthy(leaves=450), rate=0.006, warmup=0.2, rise=1.25e-5).told
    assert Trial(1400, healthy(leaves=1000)).short[0] == ("chance", 424, "on")


def test_what_is_frozen_at_first_is_given_its_time_from_when_it_trains():
    assert not Trial(1800, healthy(leaves=950), setup=Setup(thaw=600)).told
    assert Trial(1800, healthy(leaves=9999), setup=Setup(thaw=600)).short[0][:2] == ("chance", 999)


def test_where_the_rate_is_not_known_nothing_is_told_before_the_end():
    told, alarm = told_at_chance(range(1, 3000), None)
    assert not told and [each.what for each in alarm.end()] == ["chance"]


LEARNT, STANDS = healthy(leaves=100, falls=60), healthy(leaves=9999)


@pytest.mark.parametrize(("steps", "loss", "given"), [
    pytest.param(3000, lambda step: CHANCE * (0.08 if step < 1000 else 0.08 + 0.5 * math.exp(-(step - 1000) / 120)),
                 {}, id="that goes on at a higher rate has its time to get back"),
    pytest.param(40, lambda step: 0.6, {"planned": 40}, id="from trained weights may be short"),
    pytest.param(900, lambda step: LEARNT(step) + (0.5 if step > 400 else 0), {}, id="that masks make harder again"),
    pytest.param(900, lambda step: 6.0 if 500 <= step < 520 else LEARNT(step), {}, id="with a spike that passes"),
    pytest.param(900, STANDS, {"chance": math.nan}, id="whose chance is not known"),
    pytest.param(900, STANDS, {"comparable": False}, id="of another loss")])
def test_nothing_is_told_to_a_run(steps, loss, given):
    assert not Trial(steps, loss, **given).told


# ---------------------------------------------------------------- told


def test_a_loss_that_stands_at_chance_is_told_once_and_again_at_the_end():
    trial = Trial(700, STANDS, lambda step: 100.0, setup=Setup(masks=True))
    assert trial.short == [("chance", 424, "on"), ("chance", 700, "end")]
    first, text = trial.told[0], trial.told[0].text()
    assert text.startswith("Step 424: the model has learnt nothing: its loss stays at chance. The ctc loss is 2.8")
    assert "(2.83: guessing from token frequencies)" in text
    assert "In the last validation (step 400): 20 of 20 transcripts are empty, CER 100.0 %" in text
    assert "Runs of hparams/ctc.yaml that learn leave chance after 100 to 230 steps at a rate of 0.002" in text
    assert "has done 424, equivalent to 400 at its peak rate." in text
    assert [advice.split(":")[0] for advice in first.advice[:3]] == [
        "a longer warm-up", "a third of the learning rate", "no masks until the model has learnt something"]
    assert "--lr 0.00067" in text and "--schedule.warmup 150" in text and "--spec_augment null" in text
    assert trial.told[1].text().startswith("At the end of training: the model has learnt nothing")


def test_a_run_that_was_too_short_is_told_first_of_all_to_take_more_steps():
    told = Trial(300, STANDS).told
    assert [(each.what, each.at_end) for each in told] == [("chance", True)]
    assert told[0].headline == "The model has learnt nothing yet" and told[0].advice[0].startswith("more steps")


def test_a_rate_of_nearly_nothing_is_told_to_be_higher_as_soon_as_a_high_one_would_be():
    trial = Trial(1400, lambda step: 9.0, rate=1e-6)
    assert trial.short == [("chance", 424, "on"), ("chance", 1400, "end")]
    assert "still above chance" in trial.told[0].headline
    assert trial.told[0].advice[0].startswith("a higher learning rate: --lr 0.002")


def test_the_rate_that_is_named_is_one_that_the_run_had():
    """Of an extended run the schedule says what rate a longer one would have had by then."""
    class Extended(Trial):
        def look(self, step):
            self.progress.score_at(step)
            self.told += self.notices.begin_step(step, self.progress, 0.0012)

    assert "--lr 0.0004 (it has reached 0.0012)" in Extended(450, lambda step: CHANCE).told[-1].text()


def test_a_low_rate_that_comes_down_to_chance_has_three_times_the_steps_to_hear_something():
    assert Trial(1400, STANDS, rate=5e-4).short[0] == ("chance", 1224, "on")
    assert not Trial(1400, healthy(leaves=1000, falls=100), rate=5e-4).told


def test_who_took_the_advice_is_not_given_it_again(tmp_path):
    first = Trial(1000, STANDS, cut=1000, folder=tmp_path, warmup=200)
    assert "--lr 0.00067 (it has reached 0.002)" in first.told[-1].text()
    assert "--schedule.warmup 400" in first.told[-1].text()
    first.notices.setup = Setup(planned=3000, schedule=Schedule(0.00067, 400, "constant"))
    again, alarm = told_at_chance(range(1001, 1100), 0.00067, first.notices, first.progress)
    assert not again, "it was told already"
    (told,) = alarm.end()
    assert "--lr 0.00022 (it has reached 0.00067)" in told.text() and "--schedule.warmup 800" in told.text()


def test_without_a_schedule_no_key_of_one_is_advised():
    told, _ = told_at_chance(range(1, 500), 0.002)
    assert [each.step for each in told] == [400 - 1]
    assert told[0].advice[0] == "a third of the learning rate (it has reached 0.002), and a longer warm-up"


@pytest.mark.parametrize(("steps", "given", "said", "unsaid"), [
    pytest.param(700, {}, [], ["--spec_augment"], id="where nothing is masked"),
    pytest.param(300, {"warmup": 0.0217, "rise": 1.0}, ["\n  - a longer warm-up: --schedule.warmup 150\n"], [],
                 id="after a warm-up of some steps and a fraction"),
    pytest.param(700, {"planned": 3001}, ["--least_steps 6200 or more"], [], id="with more steps than there were"),
    pytest.param(700, {"planned": 3001, "setup": Setup(keys=("step_seconds",))},
                 ["--batching.least_steps 6200 or more", "a higher --epoch_counter.limit, or a smaller --step_seconds",
                  "--schedule.peak 0.00067"], ["--lr"], id="where the values are, if there are no such names"),
    pytest.param(1400, {"setup": Setup(trained=True), "rate": 3e-4},
                 ["hparams/ssl.yaml Whisper base leaves chance after 45 to 75 steps; docs/finetune.md has settings"],
                 ["100 to 230", "0.002"], id="from trained weights, without what was seen of runs from nothing")])
def test_the_advice_is_one_for_the_run(steps, given, said, unsaid):
    text = Trial(steps, STANDS, **given).told[0].text()
    assert all(each in text for each in said) and not any(each in text for each in unsaid)


@pytest.mark.parametrize(("planned", "warned"), [(4000, 174), (600, 114), (150, 104)])
def test_trained_weights_at_chance_are_told_early_what_lets_the_head_learn_first(planned, warned):
    """Above all in a short run: Whisper base spent two of four epochs there, and nothing was said before the end."""
    told = Trial(planned, STANDS, setup=Setup(trained=True), rate=3e-4).told
    assert [(each.step, each.at_end) for each in told] == [(warned, False), (planned, True)]
    assert "its loss stays at chance" in told[0].headline
    assert told[0].advice[0].endswith("--learning_rates '{ctc_lin: 33}'")


def test_the_head_of_trained_weights_is_told_a_rate_unless_it_has_one():
    head = Setup(trained=True, fastest=33, keys=("lr", "head_lr"))
    assert not Trial(1000, healthy(leaves=80, falls=60), setup=head, rate=3e-4, warmup=0.2).told
    for rate, advised in ((3e-4, "a longer warm-up"), (5e-5, "a higher learning rate of the new head")):
        assert Trial(1000, STANDS, setup=head, rate=rate).told[0].advice[0].startswith(advised)
    assert Trial(1000, STANDS, setup=head, rate=5e-5).told[0].advice[0].endswith("--head_lr 0.01")


@pytest.mark.parametrize(("rate", "advised"), [(5e-5, None), (1e-6, "--lr 5e-05 (it has reached 1e-06)")])
def test_a_low_rate_is_one_for_a_trained_encoder_unless_it_is_lower_than_any_that_others_had(rate, advised):
    told = Trial(1400, lambda step: 9.0, rate=rate, setup=Setup(trained=True)).told[0]
    assert told.advice[1].startswith(f"a higher learning rate: {advised}" if advised else "a longer warm-up")
    assert "--lr 0.002" not in told.text()


@pytest.mark.parametrize(("steps", "loss", "what"), [
    (1200, healthy(leaves=600), "chance"), (900, lambda step: 2.8 if 500 < step < 680 else LEARNT(step), "divergence")])
def test_who_learns_late_or_finds_back_is_told_that_it_is_over_and_not_accused_at_the_end(steps, loss, what):
    trial = Trial(steps, loss)
    assert [(each, how) for each, _, how in trial.short] == [(what, "on"), (what, "over")]
    assert f"The warning of step {trial.told[0].step} is over" in trial.told[1].text()


def test_what_is_lost_after_it_was_heard_is_told_as_divergence():
    trial = Trial(900, lambda step: 2.5 if step > 500 else LEARNT(step), setup=Setup(max_norm=5.0))
    assert [(what, how) for what, _, how in trial.short] == [("divergence", "on"), ("divergence", "end")]
    assert 600 < trial.told[0].step < 650
    text = trial.told[0].text()
    assert re.search(r"1[23] % below chance .*\. At its best, after step (2|3|4)\d\d, it was 7\d % below", text)
    assert "--lr 0.00067" in text and "--max_grad_norm 1 (now 5)" in text


@pytest.mark.parametrize("share", [0.52, 0.35])
def test_a_loss_that_becomes_a_multiple_for_good_is_told_however_much_is_still_heard(share):
    loss = healthy(leaves=100, falls=60, floor=0.1)
    trial = Trial(1500, lambda step: share * CHANCE if step > 500 else loss(step))
    assert trial.short == [("divergence", trial.told[0].step, "on"), ("divergence", 1500, "end")]
    assert 600 < trial.told[0].step < 650


@pytest.mark.parametrize("low", [0.005, 0.1])
def test_one_that_knows_its_utterances_by_heart_has_not_diverged_by_hearing_a_little_less(low):
    loss = healthy(leaves=100, falls=60, floor=low)
    assert not Trial(1500, lambda step: 0.25 * CHANCE if step > 700 else loss(step)).told


def test_one_that_swings_is_told_of_each_kind_twice_at_most():
    trial = Trial(6000, lambda step: CHANCE * (0.7 - 0.3 * math.sin(step / 60)))
    assert [how for what, _, how in trial.short][:4] == ["on", "over"] * 2
    assert [how for what, _, how in trial.short][4:] in ([], ["end"])


def test_a_rate_that_waits_for_something_to_be_heard_is_what_is_told_and_to_be_lowered():
    """Three times the recipe's rate: it never rose above max_lr_at_chance."""
    [told, _] = Trial(4000, lambda step: CHANCE, rate=0.009, warmup=0.2, rise=1.25e-5, unheard=0.0015).told
    assert told.step == 599, "a rise that is held is no warm-up that may still help"
    assert told.advice[0] == ("a third of the learning rate: --schedule.max_lr_at_chance 0.0005 (it has reached "
                              "0.0015)")
    assert not any("--lr" in each or "warm-up" in each for each in told.advice)


def test_once_something_was_heard_the_rate_is_that_of_the_schedule():
    learnt = healthy(leaves=200, falls=200)
    trial = Trial(3000, lambda step: learnt(step) if step < 2000 else CHANCE, rate=0.003, warmup=300, unheard=0.0015)
    [told] = [each for each in trial.told if each.what == "divergence" and not each.at_end]
    assert told.advice[0].startswith("a third of the learning rate: --lr 0.001 (it has reached 0.003)")


def test_a_loss_that_grows_is_told_from_chance_and_where_chance_is_not_known():
    def explodes(step):
        return 2.9 if step < 200 else 30.0
    for chance, began in ((CHANCE, "; chance is 2.83."), (math.nan, "; at the start it was 2.89.")):
        trial = Trial(400, explodes, chance=chance)
        assert [(what, how) for what, _, how in trial.short] == [("divergence", "on"), ("divergence", "end")]
        assert began in trial.told[0].detail


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("cut", [1, 3, 30, 449, 450, 480, 550, 700])
@pytest.mark.parametrize("kind", ["stands", "late", "loses"])
def test_a_run_that_was_resumed_is_told_what_one_never_stopped_is(cut, kind, tmp_path):
    def curve(step):
        if kind == "loses":
            return 2.6 if step > 480 else LEARNT(step)
        return healthy({"stands": 9999, "late": 520}[kind])(step)
    whole = Trial(700, curve, cer_of(curve))
    assert whole.told and Trial(700, curve, cer_of(curve), cut=cut, folder=tmp_path).told == whole.told


def test_a_run_that_goes_on_from_a_checkpoint_without_an_alarm_waits_anew():
    told, _ = told_at_chance(range(5000, 5300), 0.002)
    assert not told
