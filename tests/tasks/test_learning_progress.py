"""A model's learning progress: from its loss, the same whenever values arrive, and after resuming."""

from __future__ import annotations

import math

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from speechbrain.utils.checkpoints import Checkpointer

from sbkit.nn.spec_augment import SpecAugment
from sbkit.tasks.learning_progress import LAG, LearningProgress


@given(losses=st.lists(st.floats(0, 10), min_size=1, max_size=60), lates=st.lists(st.integers(0, LAG - 1), min_size=60))
def test_when_values_arrive_makes_no_difference(losses, lates):
    prompt, late, waiting = LearningProgress(3.0), LearningProgress(3.0), []
    for step, (loss, delay) in enumerate(zip(losses, lates, strict=False), start=1):
        assert prompt.score_at(step) == late.score_at(step)
        prompt.count(step, loss, 1.0)
        waiting.append((step, loss))
        while waiting and waiting[0][0] <= step - delay:
            late.count(*waiting.pop(0), 1.0)


@given(losses=st.lists(st.floats(0, 10), min_size=2, max_size=50), data=st.data())
def test_a_run_that_was_saved_anywhere_goes_on_as_if_it_never_had_been(losses, data, tmp_path_factory):
    cut, path = data.draw(st.integers(1, len(losses) - 1)), tmp_path_factory.mktemp("state") / "progress"
    whole, first, second = LearningProgress(3.0), LearningProgress(3.0), LearningProgress(3.0)
    for step, loss in enumerate(losses, start=1):
        if step == cut:
            first.save(path)
            second.load(path, False)
        each = first if step < cut else second
        assert whole.score_at(step) == each.score_at(step)
        assert (whole.first, whole.lowest) == (each.first, each.lowest)
        whole.count(step, loss, 1.0)
        each.count(step, loss, 1.0)


def test_a_checkpoint_of_an_earlier_version_gives_the_progress_that_it_had(tmp_path):
    """It has no first and lowest loss, and has a file of what notices had been said."""
    before, now = LearningProgress(3.0), LearningProgress(3.0)
    for step in range(1, 40):
        before.count(step, 6.0 / step, 1.0)
        before.score_at(step)
    checkpoint = Checkpointer(tmp_path, {"hearing": before, "alarm": LearningProgress()}).save_checkpoint()
    path = checkpoint.paramfiles["hearing"]
    state = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({name: state[name] for name in ("loss", "comparable", "recent")}))

    assert Checkpointer(tmp_path, {"hearing": now}).recover_if_possible() is not None
    for step in range(40, 80):
        assert now.score_at(step) == before.score_at(step) > 0
        now.count(step, 2.0, 1.0)
        before.count(step, 2.0, 1.0)
    assert now.lowest > before.lowest, "since it was resumed"


def test_chance_is_nothing_and_no_loss_is_all():
    for loss, score in ((9.0, 0.0), (3.0, 0.0), (1.5, 0.5), (0.0, 1.0)):
        progress = LearningProgress(3.0)
        for step in range(1, 10):
            progress.count(step, loss, 1.0)
        assert progress.score_at(10) == score


def test_it_smooths_over_some_twenty_steps_and_passes_over_what_is_not_finite():
    progress = LearningProgress(2.0)
    for step in range(1, 101):
        progress.count(step, math.nan if step == 50 else 2.0, 1.0)
    for step in range(101, 121):
        progress.count(step, 0.0, 1.0)
    assert progress.score_at(120 + LAG) == pytest.approx(1 - 0.95 ** 20)


def test_where_nobody_says_what_chance_is_nothing_is_known():
    assert not LearningProgress().known and LearningProgress(2.0).known


def test_a_loss_that_cannot_be_compared_is_followed_until_there_is_one_that_can(tmp_path):
    progress = LearningProgress(3.0)
    assert progress.known and progress.score_at(1) == 0.0
    for step, (loss, comparable) in enumerate([(9.0, False), (9.0, False), (1.5, True), (9.0, False)], start=1):
        progress.count(step, loss, 1.0, comparable)
    assert progress.score_at(2 + LAG) == 1.0 and progress.loss == 9.0 and not progress.known
    progress.save(tmp_path / "progress")
    again = LearningProgress(3.0)
    again.load(tmp_path / "progress", True)
    assert not again.known
    for one in (progress, again):
        assert one.score_at(4 + LAG) == 0.5 and one.known


def test_masks_widen_with_what_is_heard():
    torch.manual_seed(0)
    feats = torch.randn(64, 200, 80) + 9
    module, shares = SpecAugment(ramp=[0.3, 0.7]), []
    for score in (0.0, 0.3, 0.5, 0.7, 1.0):
        module.set_score(score)
        torch.manual_seed(1)
        shares.append(float((module(feats) != feats).float().mean()))
    assert shares[:2] == [0.0, 0.0] and 0.3 * shares[4] < shares[2] < 0.7 * shares[4] and shares[3] == shares[4] > 0.1
    always = SpecAugment(ramp=[0, 0])
    always.set_score(0.0)
    assert always.strength == 1.0
    torch.manual_seed(1)
    assert shares[4] == float((SpecAugment()(feats) != feats).float().mean())


def test_without_a_ramp_masks_stay_whole_and_with_one_until_somebody_says_what_is_heard():
    module = SpecAugment()
    module.set_score(0.0)
    assert module.strength == SpecAugment(ramp=[0.3, 0.7]).strength == 1.0


@pytest.mark.parametrize("ramp", [[0.3], [0.7, 0.3], [-0.1, 0.3], [0.3, 1.1], 0.5, "ab", ["a", 0.5]])
def test_a_ramp_is_two_shares_in_order(ramp):
    with pytest.raises(ValueError, match="two shares between 0 and 1"):
        SpecAugment(ramp=ramp)
