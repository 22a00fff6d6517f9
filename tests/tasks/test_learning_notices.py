"""A run that stays at chance or diverges gets one notice, with what to try; one that learns none."""

from __future__ import annotations

import math
import random

import pytest

from sbkit.tasks.learning_notices import EVERY, LearningNotices, Setup
from sbkit.tasks.learning_progress import LearningProgress
from sbkit.train.schedule import Schedule

CHANCE = 2.83


class Trial:
    """A run as the notices see it: a loss and a learning rate for each step."""

    def __init__(self, steps: int, loss, chance: float = CHANCE, rate: float | None = 0.002, warmup: float = 50,
                 setup: Setup | None = None, cut: int | None = None, folder=None, comparable: bool = True,
                 limit: float | None = None, own: bool = True, planned: int | None = None):
        self.progress, self.notices, self.told = LearningProgress(chance), LearningNotices(), []
        self.schedule = Schedule(rate or 1.0, warmup, "constant", max_lr_at_chance=limit)
        self.schedule.total_steps = steps
        self.notices.setup = (setup or Setup())._replace(
            planned=planned or steps, schedule=self.schedule if own else None, anneals=not own)
        noise = random.Random(7)
        for step in range(1, steps + 1):
            score = self.progress.score_at(step)
            self.schedule.set_score(score)
            now = None if rate is None else min(self.schedule(step), self.schedule.limit)
            if step % EVERY == 0:
                self.told += self.notices.look(step, self.progress, now)
            self.progress.count(step, loss(step) + noise.gauss(0, 0.04), 1.0, comparable)
            if step == cut:  # a resumed run has what was learnt, and doesn't know what was said
                self.progress.save(folder / "progress")
                self.progress = LearningProgress(chance)
                self.progress.load(folder / "progress", True)
                setup = self.notices.setup
                self.notices, self.told = LearningNotices(), []
                self.notices.setup = setup
        self.progress.score_at(steps + 1)
        self.told += self.notices.look(steps + 1, self.progress, None, ended=True)

    @property
    def short(self) -> list[tuple]:
        return [(each.code, each.step, each.holds) for each in self.told]


def healthy(leaves: int = 150, chance: float = CHANCE, falls: float = 250, floor: float = 0.3):
    """A loss that comes down to chance within some dozens of steps, stands there, and leaves."""
    def loss(step: int) -> float:
        plateau = chance * (1.01 + 4 * math.exp(-step / 8)) - 0.03 * min(1, step / 150)
        return plateau if step < leaves else plateau * max(floor, math.exp(-(step - leaves) / falls))
    return loss


LEARNT, STANDS = healthy(leaves=100, falls=60), healthy(leaves=9999)


@pytest.mark.parametrize(("steps", "loss", "given"), [
    *(pytest.param(1000, healthy(leaves, chance), {"chance": chance, "warmup": warmup}, id=f"{leaves}-{chance}-{warmup}"
                   )
      for leaves in (90, 150, 330) for chance in (CHANCE, 5.9) for warmup in (50, 0.2)),
    pytest.param(8000, healthy(leaves=2200), {"warmup": 6800}, id="a warm-up of days, whose steps count by their rate"),
    pytest.param(1400, healthy(leaves=1000), {"rate": 0.0007}, id="a lower rate, which may take longer"),
    pytest.param(1800, healthy(leaves=900), {"setup": Setup(thaw=600)}, id="frozen at first"),
    pytest.param(900, lambda step: LEARNT(step) + (0.5 if step > 400 else 0), {}, id="masks make it harder again"),
    pytest.param(900, lambda step: 6.0 if 500 <= step < 520 else LEARNT(step), {}, id="a spike that passes"),
    pytest.param(900, STANDS, {"chance": math.nan}, id="chance is not known"),
    pytest.param(900, STANDS, {"comparable": False}, id="another loss"),
    pytest.param(40, lambda step: 0.6, {}, id="from trained weights, and short"),
    pytest.param(1500, lambda step: (0.25 * CHANCE if step > 700 else healthy(100, falls=60, floor=0.005)(step)), {},
                 id="knew its utterances by heart")])
def test_a_run_that_learns_gets_no_notice(steps, loss, given):
    assert not Trial(steps, loss, **given).told


@pytest.mark.parametrize(("steps", "loss", "given", "notices", "says"), [
    pytest.param(700, STANDS, {"setup": Setup(masks=True, keys=("lr", "min_steps"))}, [("nothing-learnt", True)],
                 ["Step 4", "the model has learnt nothing [nothing-learnt]. The loss",
                  "(2.83: guessing from token frequencies)",
                  "--lr 0.00067 (it has reached 0.002)", "--schedule.warmup 150", "--spec_augment.ramp"], id="stands"),
    pytest.param(300, STANDS, {}, [("nothing-learnt", True)],
                 ["has learnt nothing yet [nothing-learnt].", "likeliest first:\n  - more steps: --min_steps 1000"],
                 id="too short"),
    pytest.param(1400, lambda step: 9.0, {"rate": 1e-6}, [("nothing-learnt", True)],
                 ["above chance", "a higher learning rate: --lr 0.002"], id="a rate of nearly nothing"),
    pytest.param(1400, lambda step: 9.0, {"rate": 1e-6, "own": False}, [("nothing-learnt", True)],
                 ["a scheduler that rises sooner or higher: the learning rate has reached 1e-06, and 0.002 is usual"],
                 id="nearly nothing by a scheduler of SpeechBrain"),
    pytest.param(3000, STANDS, {"rate": None}, [("nothing-learnt", True)], ["Step 3,000"], id="the rate is not known"),
    pytest.param(700, STANDS, {"setup": Setup(keys=()), "warmup": 100}, [("nothing-learnt", True)],
                 ["--batching.min_steps", "--schedule.peak 0.00067", "--schedule.warmup 200"],
                 id="no such names in the recipe"),
    pytest.param(4000, STANDS, {"rate": 0.009, "warmup": 0.2, "limit": 0.0015}, [("nothing-learnt", True)],
                 ["--schedule.max_lr_at_chance 0.0005 (it has reached 0.0015)"], id="a rate that waits"),
    pytest.param(4000, STANDS, {"rate": 1.0, "warmup": 0.2, "limit": 0.0015}, [("nothing-learnt", True)],
                 ["no limits of the learning rate, which has reached 0.0015 of 1: --schedule.max_lr_at_chance null"],
                 id="a rate for Adadelta that waits"),
    pytest.param(600, STANDS, {"rate": 3e-4, "setup": Setup(trained=True, keys=(
        "lr", "head_lr", "CNN", "Transformer"))}, [("nothing-learnt", True)],
                 ["if the head is new, it alone first, in a new run", "--freeze '{CNN: 100, Transformer: 100}'",
                  "if the head is new, a higher rate for it: --head_lr 0.01"], id="from trained weights"),
    pytest.param(600, STANDS, {"rate": 3e-4, "setup": Setup(trained=True, fastest=60, keys=("lr", "encoder"))},
                 [("nothing-learnt", True)],
                 ["first:\n  - if the head is new, it alone first", "--freeze '{encoder: 100}'"],
                 id="a pretrained encoder of which nothing was frozen"),
    pytest.param(600, STANDS, {"rate": 3e-4, "setup": Setup(trained=True, freezes=True, thaw=100, keys=("head_lr",))},
                 [("nothing-learnt", True)], ["first:\n  - if the head is new, a higher rate for it: --head_lr 0.01"],
                 id="a head that trained first in vain"),
    pytest.param(1200, healthy(leaves=600), {}, [("nothing-learnt", True), ("nothing-learnt", False)],
                 ["the model learns now [nothing-learnt]"],
                 id="learns late"),
    pytest.param(900, lambda step: 2.8 if 500 < step < 680 else LEARNT(step), {},
                 [("diverged", True), ("diverged", False)], ["has recovered"], id="loses and finds back"),
    pytest.param(900, lambda step: 2.5 if step > 500 else LEARNT(step), {"setup": Setup(max_norm=5.0)},
                 [("diverged", True)], ["the model loses what it has learnt [diverged]", "--max_grad_norm 1 (now 5)",
                                          "--lr 0.00067"], id="loses for good"),
    pytest.param(1500, lambda step: (0.52 * CHANCE if step > 500 else healthy(100, falls=60, floor=0.1)(step)), {},
                 [("diverged", True)], ["loses what it has learnt"], id="loses much"),
    pytest.param(400, lambda step: 2.9 if step < 200 else 30.0, {"chance": math.nan}, [("diverged", True)],
                 ["the loss grows beyond where it began", "it began at 2.9."], id="grows")])
def test_a_run_that_does_not_learn_gets_a_notice_when_it_begins_and_when_it_is_over(steps, loss, given, notices, says):
    trial = Trial(steps, loss, **given)
    text = "\n".join(each.text() for each in trial.told)
    assert [(what, holds) for what, _, holds in trial.short] == notices
    assert not [each for each in says if each.lower() not in text.lower()], text


@pytest.mark.parametrize(("planned", "advised"), [(64, False), (200, False), (300, True)])
def test_advises_a_longer_warm_up_only_in_a_run_that_is_twice_as_long(planned, advised):
    (notice,) = Trial(planned, STANDS).told
    assert ("--schedule.warmup 150" in notice.text()) is advised


def test_counts_the_steps_that_a_run_may_take_and_not_those_of_its_epochs():
    (notice,) = Trial(200, STANDS, setup=Setup(step_limit=200), planned=4000).told
    assert "--schedule.warmup" not in notice.text()
    assert "more steps: --optimizer_step_limit 1000 or more" in notice.text()


@pytest.mark.parametrize(("planned", "warned"), [(4000, 180), (600, 120), (150, 110)])
def test_trained_weights_at_chance_are_noticed_early_above_all_in_a_short_run(planned, warned):
    told = Trial(planned, STANDS, setup=Setup(trained=True), rate=3e-4).told
    assert len(told) == 1 and abs(told[0].step - warned) <= 2 * EVERY


@pytest.mark.parametrize("cut", [1, 30, 449, 450, 480, 550, 700])
@pytest.mark.parametrize(("loss", "holds"), [
    (STANDS, {"nothing-learnt"}), (healthy(520), set()),
    (lambda step: 2.6 if step > 480 else LEARNT(step), {"diverged"})])
def test_a_resumed_run_says_what_still_holds_at_its_end(cut, loss, holds, tmp_path):
    def at_the_end(**stop):
        return {what for what, last in {what: last for what, _, last in Trial(900, loss, **stop).short}.items() if last}

    assert at_the_end() == at_the_end(cut=cut, folder=tmp_path) == holds


def test_a_second_fit_that_begins_a_step_again_does_not_count_it_twice():
    def noticed_at(looks):
        notices, progress = LearningNotices(), LearningProgress(CHANCE)
        for step in range(EVERY, 1000, EVERY):
            progress.count(step - EVERY, CHANCE, 1.0)
            progress.score_at(step)
            for _ in range(looks):
                for told in notices.look(step, progress, 0.002):
                    return told.step

    assert noticed_at(2) == noticed_at(1) > 300
