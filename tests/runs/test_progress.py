"""The length of a run is known before it resumes, whatever was stopped, extended or changed, and what was lost."""

import json
from types import SimpleNamespace

import pytest
import yaml
from speechbrain.core import Stage
from speechbrain.utils.epoch_loop import EpochCounter, EpochCounterWithStopper
from toys import ToyBrain, ToyEvalLoader, ToyTrainLoader, brain

from sbkit.data.plan import Batching, Plan
from sbkit.runs.progress import RunProgress, last_logged_step, read_progress, warn_of_lost_steps
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.early_stopping import EarlyStopping

BEGAN = 3  # epochs, of 5 steps


class Stop(Exception):
    pass


class Stopping(ToyBrain):
    """Saves each epoch and every second step, and dies before some update."""

    def on_fit_batch_start(self, batch, should_step):
        if self.optimizer_step == self.hparams.die_at:
            raise Stop

    def on_stage_end(self, stage, stage_loss, epoch):
        if stage == Stage.VALID:
            self.checkpointer.save_checkpoint(meta={"epoch": epoch})


def shelf(folder, epochs):
    counter = EpochCounter(epochs)
    return Checkpointer(folder, {"counter": counter}), counter


def run(folder, epochs=BEGAN, steps=5, die_at=None):
    """The steps of the whole run, as they are known before it starts, and those that it has in the end."""
    checkpointer, counter = shelf(folder, epochs)
    found = read_progress(checkpointer, counter)
    toy = brain(Stopping, checkpointer=checkpointer, hparams={"die_at": die_at}, ckpt_interval_steps=2)
    toy.checkpointer.add_recoverable("model", toy.hparams.model)
    toy.train_state.planned_epochs = found.epochs
    try:
        toy.fit(counter, ToyTrainLoader(steps, 6), ToyEvalLoader(5))
    finally:
        toy.checkpointer.wait()
    return found.steps(steps, epochs), toy.optimizer_step


def stopped(folder, die_at):
    if die_at is None:
        assert run(folder) == (15, 15)
    else:
        with pytest.raises(Stop):
            run(folder, die_at=die_at)


@pytest.mark.slow
@pytest.mark.parametrize("die_at, epochs, steps, in_all", [
    (1, 4, 5, 20),  # before a checkpoint
    (9, 3, 5, 15), (5, 4, 5, 20), (9, 4, 5, 20), (None, 5, 5, 25),  # resumed, or extended
    (9, 1, 5, 9), (None, 2, 5, 15),  # cut short below what is done
    (9, 3, 2, 9 + 2), (9, 3, 7, 9 + 3 + 7), (None, 5, 2, 15 + 4)])  # another corpus or batching
def test_the_length_that_is_told_is_that_which_a_run_comes_to(tmp_path, die_at, epochs, steps, in_all):
    stopped(tmp_path, die_at)
    assert run(tmp_path, epochs, steps) == (in_all, in_all)


def test_it_does_not_change_if_the_newest_checkpoint_is_damaged(tmp_path):
    stopped(tmp_path, 9)
    saved = sorted(tmp_path.glob("CKPT+*/brain.ckpt"), key=lambda path: yaml.safe_load(path.read_text())["step"])
    assert len(saved) > 1
    for path, left in ((saved[-1], "epochs: ["), (saved[-1], ""), (saved[-1], "3")):
        path.write_text(left)
        assert read_progress(*shelf(tmp_path, 4)).steps(5, 4) == 20
    for path in saved:
        path.write_bytes(b"\xff\x00")
    assert read_progress(*shelf(tmp_path, 4)) == RunProgress(4)


def test_an_epoch_keeps_its_length_when_there_are_to_be_more(tmp_path):
    batching, seconds = Batching(100, min_steps=60), [20.0] * 25  # 5 steps
    assert len(Plan(seconds, batching, epochs=BEGAN)) == 20
    assert read_progress(*shelf(tmp_path, 30)).epochs == 30
    stopped(tmp_path, None)
    for epochs in (30, 6, 2):
        found = read_progress(*shelf(tmp_path, epochs))
        assert len(Plan(seconds, batching, epochs=found.epochs)) == 20 and found[1:4] == (15, 3, 0)
        assert found.keys_to_raise == ("number_of_epochs" if epochs == 2 else "")
    run(tmp_path, 4)
    assert read_progress(*shelf(tmp_path, 9)) == RunProgress(BEGAN, 20, 4)


def test_a_run_that_stopped_early_trains_on_only_with_more_patience(tmp_path):
    def counter(limit, patience):
        found = EpochCounterWithStopper(limit, limit_to_stop=patience, limit_warmup=0, direction="min")
        checkpointer = Checkpointer(tmp_path, {"counter": found})
        return found, checkpointer, EarlyStopping(found, checkpointer)

    epochs, checkpointer, stopping = counter(9, patience=2)
    toy = brain(Stopping, checkpointer=checkpointer, hparams={"die_at": None})
    for epoch, loss in zip(epochs, (3.0, 4.0, 4.0), strict=False):
        stopping.after_validation("loss", loss)
        toy.checkpointer.save_checkpoint(meta={"epoch": epoch})
    toy.checkpointer.wait()
    assert epochs.current == 3
    larger = {(limit, patience): read_progress(*counter(limit, patience)[1::-1]).keys_to_raise
              for limit in (3, 9, 20) for patience in (2, 5)}
    early = "limit_to_stop (it stopped early)"
    assert larger == {(3, 2): f"number_of_epochs and {early}", (9, 2): early, (20, 2): early,
                      (3, 5): "number_of_epochs", (9, 5): "", (20, 5): ""}


def test_a_checkpoint_that_does_not_say_with_how_many_epochs_it_began_is_taken_by_its_steps(tmp_path):
    stopped(tmp_path, 9)
    for path in tmp_path.glob("CKPT+*/brain.ckpt"):
        state = yaml.safe_load(path.read_text())
        del state["epochs"]
        path.write_text(yaml.safe_dump(state))
    assert read_progress(*shelf(tmp_path, 7)) == RunProgress(7, 9, 1, 4)


def test_a_counter_that_is_not_saved_begins_anew(tmp_path):
    stopped(tmp_path, 9)
    assert read_progress(Checkpointer(tmp_path), EpochCounter(4)) == RunProgress(4)


@pytest.mark.parametrize("minutes, batches, first", [
    (10.0, 0, "after 10 minutes (ckpt_interval_minutes), or at the end of epoch 1, after 247 steps"),
    (0, 500, "after 500 batches (ckpt_interval_steps), or at the end of epoch 1, after 247 steps"),
    (-1, 0, "saved at the end of epoch 1, after 247 steps")])
@pytest.mark.parametrize("lines, lost", [
    ([("run", None), ("loss", 1), ("step", 90), ("loss", 10)], 90), ([("run", None), ("test", 40)], None),
    (None, None)])
def test_what_a_start_did_that_left_no_checkpoint_is_said(tmp_path, caplog, minutes, batches, first, lines, lost):
    toy = SimpleNamespace(keys=SimpleNamespace(output_folder=tmp_path), ckpt_interval_minutes=minutes,
                          ckpt_interval_steps=batches)
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text("".join(
            json.dumps({"time": 1.5, "kind": kind, "step": step}) + "\n" for kind, step in lines))
    warn_of_lost_steps(toy, last_logged_step(tmp_path), 247)
    said = f"An earlier start of this run reached step {lost} or later but saved no checkpoint"
    assert (said in caplog.text and first in caplog.text) if lost else not caplog.text
