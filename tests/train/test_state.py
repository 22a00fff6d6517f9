"""Where a run stands: what of the counters outlives the process."""

import time

import pytest

from sbkit.train.state import TrainState


@pytest.fixture(autouse=True)
def _clock_that_stands(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)


def state(**more):
    found = TrainState(optimizer_step=12, batches_in_epoch=5, steps_in_epoch=2, planned_steps_in_epoch=6,
                       failed_in_epoch=1, **more)
    found.mean_loss.add(8.0, 4.0)
    return found


def test_what_is_written_down_is_read_back():
    first, second = state(parameters_vary=True, epoch_began=960.0), TrainState()
    assert first.state_dict(2.0)["train_seconds"] == 40.0
    second.load_state_dict(first.state_dict(2.0), end_of_epoch=False)
    assert second.state_dict(2.0) == first.state_dict(2.0) and second.mean_loss.value() == 2.0
    assert set(first.state_dict(2.0)) == {
        "step", "avg_train_loss", "optimizer_step", "epochs", "epoch_step", "epoch_steps", "loss_sums",
        "nonfinite_count", "graph_changes", "train_seconds"}


def test_an_epochs_checkpoint_begins_the_next_one():
    again = TrainState()
    again.load_state_dict(state(epoch_began=960.0).state_dict(2.0), end_of_epoch=True)
    assert (again.batches_in_epoch, again.steps_in_epoch, again.planned_steps_in_epoch, again.optimizer_step,
            again.failed_in_epoch, again.mean_loss.value(), again.epoch_began) == (0, 0, None, 12, 0, 0.0, 1000.0)


@pytest.mark.parametrize("saved, steps", [({}, 7), ({"optimizer_step": 3}, 3)])
def test_a_checkpoint_of_speechbrains_is_read(saved, steps):
    again = TrainState()
    again.load_state_dict({"step": 7, "avg_train_loss": 1.5, **saved}, end_of_epoch=False)
    assert (again.batches_in_epoch, again.optimizer_step, again.steps_in_epoch) == (7, steps, 0)
    assert again.mean_loss.value() == 1.5


def test_an_interrupted_validation_does_not_change_the_epochs_training_state():
    found = state()
    before = found.state_dict(2.0)
    found.end_training()
    assert (found.batches_in_epoch, found.steps_in_epoch, found.failed_in_epoch, found.mean_loss.count) == (0, 0, 0, 0)
    found.back_to_training()
    assert found.state_dict(2.0) == before
