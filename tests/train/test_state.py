"""Where a run stands: what of the counters outlives the process."""

import time

import pytest

from sbkit.train.state import TrainState


@pytest.fixture(autouse=True)
def _clock_that_stands(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)


def state(**more):
    found = TrainState(step=5, optimizer_step=12, epoch_step=2, epoch_steps=6, nonfinite_count=1, **more)
    found.mean_loss.add(8.0, 4.0)
    return found


def test_what_is_written_down_is_read_back():
    first, second = state(graph_changes=True, began=960.0), TrainState()
    assert first.state_dict(2.0)["train_seconds"] == 40.0
    second.load_state_dict(first.state_dict(2.0), end_of_epoch=False)
    assert second.state_dict(2.0) == first.state_dict(2.0) and second.mean_loss.value() == 2.0
    assert set(first.state_dict(2.0)) == {
        "step", "avg_train_loss", "optimizer_step", "epochs", "epoch_step", "epoch_steps", "loss_sums",
        "nonfinite_count", "graph_changes", "train_seconds"}


def test_an_epochs_checkpoint_begins_the_next_one():
    again = TrainState()
    again.load_state_dict(state(began=960.0).state_dict(2.0), end_of_epoch=True)
    assert (again.step, again.epoch_step, again.epoch_steps, again.optimizer_step, again.nonfinite_count,
            again.mean_loss.value(), again.began) == (0, 0, None, 12, 0, 0.0, 1000.0)


@pytest.mark.parametrize("saved, steps", [({}, 7), ({"optimizer_step": 3}, 3)])
def test_a_checkpoint_of_speechbrains_is_read(saved, steps):
    again = TrainState()
    again.load_state_dict({"step": 7, "avg_train_loss": 1.5, **saved}, end_of_epoch=False)
    assert (again.step, again.optimizer_step, again.epoch_step, again.mean_loss.value()) == (7, steps, 0, 1.5)


def test_an_interrupted_validation_does_not_change_the_epochs_training_state():
    found = state()
    before = found.state_dict(2.0)
    found.end_training()
    assert (found.step, found.epoch_step, found.nonfinite_count, found.mean_loss.count) == (0, 0, 0, 0)
    found.back_to_training()
    assert found.state_dict(2.0) == before
