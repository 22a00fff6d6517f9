"""A run that stopped or died, at any place, goes on as if it had not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
import yaml
from speechbrain.augment.augmenter import Augmenter
from speechbrain.augment.time_domain import AddNoise, AddReverb
from speechbrain.core import Stage
from speechbrain.nnet.RNN import LiGRU, SLiGRU
from speechbrain.nnet.schedulers import NoamScheduler
from speechbrain.utils.epoch_loop import EpochCounter
from toys import SIZE, ToyBrain, ToyEvalLoader, ToyTrainLoader, brain, layers, state

from sbkit.train.checkpoint import Checkpointer
from sbkit.train.signals import Stopped
from sbkit.train.train_log import TrainLog


class Stop(Exception):
    pass


class Stopping(ToyBrain):
    """Dies in the middle of a step, after some updates."""

    def on_fit_batch_start(self, batch, should_step):
        if self.optimizer_step == self.hparams.die_at and batch.micro == 1:
            raise Stop


class StoppingInItsOwnStep(Stopping):
    """Trains by SpeechBrain's own loop."""

    def fit_batch(self, batch):
        return super().fit_batch(batch)


def run(folder, die_at=None, steps=5, output_folder=None, kind=Stopping, **run_opts):
    counter = EpochCounter(3)
    toy = brain(kind, checkpointer=Checkpointer(folder, {"counter": counter}), ckpt_interval_steps=4,
                hparams={"die_at": die_at, "output_folder": output_folder}, **run_opts)
    toy.checkpointer.add_recoverable("model", toy.hparams.model)
    try:
        toy.fit(counter, ToyTrainLoader(steps, 6, micros=2), ToyEvalLoader(5))
    finally:
        toy.checkpointer.wait()  # a process that ends waits too
    return toy


@pytest.mark.slow
@pytest.mark.parametrize("kind, die_at", [(Stopping, 3), (Stopping, 5), (Stopping, 7), (Stopping, 12),
                                          (StoppingInItsOwnStep, 3), (StoppingInItsOwnStep, 7)])
def test_a_run_that_died_within_a_step_resumes_exactly(tmp_path, kind, die_at):
    whole = run(tmp_path / "whole", kind=kind)
    with pytest.raises(Stop):
        run(tmp_path / "cut", die_at, kind=kind)
    again = run(tmp_path / "cut", kind=kind)
    assert all(torch.equal(value, state(again)[name]) for name, value in state(whole).items())
    assert again.ends == whole.ends[-len(again.ends):]
    assert again.optimizer_step == whole.optimizer_step == 15


class Adversarial(ToyBrain):
    """Two optimizers and a step that counts nothing, as in a GAN; which of them are saved is ``own.saved``."""

    def init_optimizers(self):
        self.first = torch.optim.Adam(self.modules.model[0].parameters())
        self.second = torch.optim.Adam(self.modules.model[2].parameters())
        self.optimizers_dict = {"first": self.first, "second": self.second}
        for name in self.hparams.saved:
            self.checkpointer.add_recoverable(name, self.optimizers_dict[name])

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN).mean
        loss.backward()
        self.first.step()
        self.second.step()
        self.zero_grad()
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss.detach()


@pytest.mark.parametrize("saved", [(), ("first", "second")])
def test_a_script_is_told_which_of_its_optimizers_no_checkpoint_has_and_where_it_stopped(tmp_path, caplog, saved):
    toy = brain(Adversarial, checkpointer=Checkpointer(tmp_path), hparams={"saved": saved})
    with pytest.raises(Stopped, match="stopped by SIGTERM after batch 2 of epoch 1, checkpoint saved"):
        toy.fit([1], ToyTrainLoader(3, 6))
    told = {name: f"self.checkpointer.add_recoverable('{name}', self.{name})" in caplog.text
            for name in ("first", "second")}
    assert told == dict.fromkeys(told, not saved)


class Resting(ToyBrain):
    """Gets SIGTERM in its second batch, while it updates nothing."""

    batches = 0

    def freeze_optimizers(self, optimizers):
        return {}

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.batches += 1
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class Reading(Resting):
    """Reads gradients, and has no optimizer."""

    def init_optimizers(self):
        self.opt_class = self.optimizers_dict = None


@pytest.mark.parametrize("cls, place", [(Resting, "step 3"), (Reading, "batch 3 of epoch 1")])
def test_a_run_stops_also_while_it_updates_nothing(tmp_path, cls, place):
    toy = brain(cls, checkpointer=Checkpointer(tmp_path), ckpt_interval_steps=2)
    with pytest.raises(Stopped, match=f"stopped by SIGTERM after {place}, checkpoint saved"):
        toy.fit([1], ToyTrainLoader(9, 6))
    resumed = brain(cls, checkpointer=Checkpointer(tmp_path))
    resumed.fit([1], ToyTrainLoader(9, 6))
    assert resumed.batches == 6 and resumed.optimizer_step == (9 if cls is Resting else 0)


class Recurrent(Stopping):
    """With a layer that draws 16,000 masks ahead and counts those that it used."""

    def compute_forward(self, batch, stage):
        hidden, _ = self.hparams.model[-1](batch.x[:, None].expand(-1, 3, -1))
        return super().compute_forward(batch, stage) * hidden.mean((1, 2))


@pytest.mark.parametrize("layer", [LiGRU, SLiGRU])
def test_masks_that_were_drawn_ahead_are_used_on_after_a_resume(tmp_path, layer):
    def trained(folder, die_at=None):
        torch.manual_seed(0)
        model = layers().append(layer(5, [4, 3, SIZE], num_layers=2, dropout=0.5, bidirectional=True))
        return run(folder, die_at, kind=Recurrent, modules=model)

    whole = trained(tmp_path / "whole")
    with pytest.raises(Stop):
        trained(tmp_path / "cut", 7)
    again = trained(tmp_path / "cut")
    assert all(torch.equal(value, state(again)[name]) for name, value in state(whole).items())


class Noisy(Stopping):
    """Adds noise and reverberation by SpeechBrain's augmenters, which read recordings by loaders of their own."""

    def compute_forward(self, batch, stage):
        if stage == Stage.TRAIN:
            waves = self.own.rooms(self.hparams.augment(batch.x, torch.ones(len(batch.x)))[0])
            self.drawn = [*getattr(self, "drawn", []), waves.sum().item()]
        return super().compute_forward(batch, stage)


def noisy(folder, lists, die_at=None):
    noise = AddNoise(str(lists), sorting="random", snr_low=0, snr_high=15)
    counter = EpochCounter(3)
    toy = brain(Noisy, checkpointer=Checkpointer(folder, {"counter": counter}), ckpt_interval_steps=4,
                hparams={"die_at": die_at, "augment": Augmenter(augmentations=[noise], min_augmentations=1)})
    toy.own = SimpleNamespace(rooms=partial(AddReverb(str(lists))))  # an object of the user's own
    toy.checkpointer.add_recoverable("model", toy.hparams.model)
    torch.manual_seed(5)
    try:
        toy.fit(counter, ToyTrainLoader(5, 6, micros=2), ToyEvalLoader(5))
    except Stop:
        pass
    finally:
        toy.checkpointer.wait()
    return toy.drawn


@pytest.mark.slow
@pytest.mark.parametrize("die_at", [3, 7])
def test_noise_and_rooms_of_speechbrains_augmenters_go_on_after_a_resume(tmp_path, die_at):
    """What they draw depends on where their own loaders are, which no file of theirs tells."""
    lines = ["ID,duration,wav,wav_format,wav_opts"]
    for i in range(7):
        soundfile.write(tmp_path / f"{i}.wav", np.random.default_rng(i).standard_normal(400) * 0.1, 16000)
        lines.append(f"{i},0.025,{tmp_path / f'{i}.wav'},wav,")
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    whole = noisy(tmp_path / "whole", tmp_path / "list.csv")
    noisy(tmp_path / "cut", tmp_path / "list.csv", die_at)
    again = noisy(tmp_path / "cut", tmp_path / "list.csv")
    assert len(whole) == 30 and 0 < len(again) < 30 and again == whole[-len(again):]


PLACES = ("end of training", "start of validation", "in validation")
END, SAVED = "end of validation", "after its checkpoint"


class Ending(ToyBrain):
    """Draws random numbers and changes what is saved, wherever a recipe may; ends at a place of epoch 2."""

    def at(self, place):
        if place == self.hparams.place and self.train_state.epoch == 2:
            self.hparams.place = None
            self.hparams.end()

    def compute_forward(self, batch, stage):
        self.trained = getattr(self, "trained", 0) + (stage == Stage.TRAIN)
        predictions = super().compute_forward(batch, stage)
        return torch.nn.functional.dropout(predictions, 0.3, training=stage == Stage.TRAIN)

    def on_stage_start(self, stage, epoch=None):
        torch.rand(1)
        if stage == Stage.VALID:
            self.at("start of validation")

    def evaluate_batch(self, batch, stage):
        self.evaluated = getattr(self, "evaluated", 0) + 1
        if self.evaluated > 1:
            self.at("in validation")
        return super().evaluate_batch(batch, stage).mean + float(torch.rand(1))

    def on_stage_end(self, stage, stage_loss, epoch):
        super().on_stage_end(stage, stage_loss, epoch)
        if stage == Stage.TRAIN:
            self.train_loss = stage_loss
            self.hparams.noam(self.optimizer)  # each epoch, before its validation
            self.at("end of training")
        else:
            self.at(END)
            self.hparams.log.log_stats({"epoch": epoch}, {"loss": self.train_loss}, {"loss": stage_loss})
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])
            self.at(SAVED)


def ended(folder, place=None, end=None, **run_opts):
    """Train three epochs, or until it ends at a place: the brain and what ended it."""
    counter, model, noam, log = EpochCounter(3), layers(), NoamScheduler(0.5, 4), TrainLog(folder / "train_log.txt")
    hparams = {"place": place, "end": end, "noam": noam, "log": log, "output_folder": str(folder), "log_interval": 0}
    checkpointer = Checkpointer(folder / "save", {"counter": counter, "model": model, "noam": noam, "log": log})
    torch.manual_seed(3)
    toy = brain(Ending, modules=model, checkpointer=checkpointer, hparams=hparams, **run_opts)
    try:
        toy.fit(counter, ToyTrainLoader(3, 6), ToyEvalLoader(9))
    except (Stopped, Stop) as error:
        return toy, error
    finally:
        toy.checkpointer.wait()
        toy.metrics_log.flush()
    return toy, None


def everything_of(toy, folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return (state(toy), toy.optimizer.state_dict()["state"][0], toy.optimizer.param_groups[0]["lr"],
            toy.hparams.noam.n_steps, torch.rand(1), (folder / "train_log.txt").read_text(),
            [[line.get(key) for key in ("kind", "epoch", "step", "loss", "train_loss")] for line in lines])


def assert_the_same(one, other):
    for a, b in zip(one, other, strict=True):
        if isinstance(a, dict):
            assert a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())
        else:
            assert a == b


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run that nothing ended, and everything else of it."""
    folder = tmp_path_factory.mktemp("whole")
    toy, _ = ended(folder)
    return toy.ends, everything_of(toy, folder)


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_in_validation_stops_it_and_the_run_resumes_exactly(tmp_path, whole, place):
    cut, end = ended(tmp_path, place, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert end.exit_code == 143 and "after step 6, checkpoint saved at" in str(end)
    assert cut.evaluated < 10 and [stage for stage, _ in cut.ends] == ["TRAIN", "VALID", "TRAIN"]
    assert "VALID" not in [stage for stage, _ in cut.ends[2:]]
    assert not [path for path in (tmp_path / "save").iterdir() if path.name.startswith(".")]
    again, _ = ended(tmp_path)
    assert again.ends == whole[0][2:]
    assert_the_same(whole[1], everything_of(again, tmp_path))


@pytest.mark.parametrize("place, saves, every, trains", [
    *((place, *each) for place in (*PLACES, END) for each in [(True, 0, 3), (False, 0, 6), (False, 2, 4)]),
    (SAVED, True, 0, 3)])
def test_an_error_around_validation_costs_no_training_and_the_run_resumes_exactly(
        tmp_path, whole, place, saves, every, trains, monkeypatch, caplog):
    """A process that died saves nothing then, and trains again from the last checkpoint."""
    def fail():
        raise Stop

    if not saves:
        monkeypatch.setattr(Checkpointer, "publish", lambda self: None)
    _, end = ended(tmp_path, place, fail, ckpt_interval_steps=every)
    assert isinstance(end, Stop)
    assert ("Epoch 2's training is saved: the same command goes on with its validation." in caplog.text) == saves
    assert not [path for path in (tmp_path / "save").iterdir() if path.name.startswith(".")]
    again, _ = ended(tmp_path, ckpt_interval_steps=every)
    assert [stage for stage, _ in again.ends] == ["TRAIN", "VALID"] * 2 and again.trained == trains
    assert_the_same(whole[1], everything_of(again, tmp_path))


def test_a_run_that_died_before_its_first_checkpoint_leaves_no_lines_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpointer, "publish", lambda self: None)

    class Early(Ending):
        def on_stage_end(self, stage, stage_loss, epoch):
            if stage == Stage.VALID:
                self.hparams.log.log_stats({"epoch": epoch}, {"loss": 1.0}, {"loss": stage_loss})
            if self.hparams.place == "early":
                raise Stop

    def lines():
        return [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    def start(place):
        log = TrainLog(tmp_path / "train_log.txt")
        hparams = {"place": place, "log": log, "output_folder": str(tmp_path), "log_interval": 0}
        toy = brain(Early, checkpointer=Checkpointer(tmp_path / "save", {"log": log}), hparams=hparams)
        toy.metrics_log.write("run", devices=1)
        with contextlib.suppress(Stop):
            toy.fit([1], ToyTrainLoader(3), ToyEvalLoader(2))
        toy.metrics_log.flush()

    (tmp_path / "train_log.txt").write_text("epoch: 1 - train loss: 1 - valid loss: 2\nepoch: 9 - test loss: 1\n")
    start("early")
    once = ["step", "step", "step", "epoch"]
    assert lines() == ["run", *once]
    start(None)
    assert lines() == ["run", "run", *once]
    log = (tmp_path / "train_log.txt").read_text().splitlines()
    assert log[0] == "epoch: 9 - test loss: 1" and len(log) == 2 and log[1].startswith("epoch: 1 - train loss: 1")


def test_a_checkpoint_is_saved_every_so_many_minutes(tmp_path, monkeypatch):
    now, saves = [0.0], []
    monkeypatch.setattr("sbkit.train.trainer.time.monotonic", lambda: now[0])
    toy = brain(checkpointer=Checkpointer(tmp_path), ckpt_interval_minutes=1)
    toy.on_fit_batch_start = lambda batch, should_step: now.append(now.pop() + 25.0)  # a step takes 25 s
    toy._save_intra_epoch_ckpt = lambda: saves.append(toy.optimizer_step)
    toy.fit(range(1, 2), ToyTrainLoader(9))
    assert saves == [3, 6, 9]


def test_an_epoch_s_time_adds_up_over_a_stop(tmp_path, monkeypatch):
    now, begin = [0.0], Stopping.on_fit_batch_start
    monkeypatch.setattr("sbkit.train.trainer.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Stopping, "on_fit_batch_start",
                        lambda *batch: (now.append(now.pop() + 25.0), begin(*batch)))  # a micro-batch takes 25 s
    with pytest.raises(Stop):
        run(tmp_path, die_at=9, output_folder=str(tmp_path))
    run(tmp_path, output_folder=str(tmp_path))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["train_seconds"] for line in lines if "train_seconds" in line] == [250.0] * 3


def test_positions_are_saved_between_steps_only(tmp_path):
    with pytest.raises(Stop):
        run(tmp_path, die_at=4)
    (found,) = Checkpointer(tmp_path).list_checkpoints()
    saved = yaml.safe_load((found.path / "brain.ckpt").read_text())
    # every 4 micro-batches are due, steps have 2, and the run died in the fifth step
    assert (saved["step"], saved["epoch_step"], saved["optimizer_step"]) == (8, 4, 4)
    assert saved["avg_train_loss"] == pytest.approx(saved["loss_sums"][0] / saved["loss_sums"][1])


@pytest.mark.parametrize("steps, in_all", [(7, 7 + 7 + 7), (2, 4 + 2 + 2)])
def test_an_epoch_that_is_planned_again_in_its_middle_continues_with_a_warning(tmp_path, caplog, steps, in_all):
    with pytest.raises(Stop):
        run(tmp_path, die_at=4)  # after 4 of 5 steps
    assert "Epoch 1 started with" not in caplog.text
    again = run(tmp_path, steps=steps)
    assert f"Epoch 1 started with 5 steps and now has {steps}: " in caplog.text
    assert again.optimizer_step == in_all


def test_an_epoch_s_checkpoint_taken_at_the_end_of_training_starts_the_next_epoch_at_its_beginning(tmp_path):
    """SpeechBrain would go on counting where the epoch ended."""

    class Saves(ToyBrain):
        def on_stage_end(self, stage, stage_loss, epoch):
            self.checkpointer.save_checkpoint()

    toy = brain(Saves, checkpointer=Checkpointer(tmp_path))
    toy.fit(range(1, 2), ToyTrainLoader(3))
    again = brain(Saves, checkpointer=Checkpointer(tmp_path))
    again.on_fit_start()
    assert (again.step, again.train_state.steps_in_epoch, again.optimizer_step, again.avg_train_loss) == (0, 0, 3, 0.0)
