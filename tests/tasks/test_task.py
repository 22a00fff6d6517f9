"""What every task has from its base class, whatever it is trained for."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from batches import tensors_by_field
from refusals import refused
from speechbrain.core import Stage
from speechbrain.nnet.schedulers import InverseSquareRootScheduler, NewBobScheduler, NoamScheduler
from speechbrain.utils.epoch_loop import EpochCounterWithStopper
from speechbrain.utils.train_logger import TrainLogger
from torch.utils.data import IterableDataset

from sbkit.compat import loaders
from sbkit.data.batch import PlannedBatch, dummy_batch
from sbkit.recipe.load import Recipe
from sbkit.runs.evaluation_options import open_recogniser, use_chunks
from sbkit.tasks.task import Task
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks
from sbkit.train.schedule import Schedule


class Sums(Task):
    """Two layers, each of which the checkpointer knows by its own name."""

    def compute_forward(self, batch, stage):
        return self.modules.head(self.modules.encoder(batch))

    def compute_objectives(self, outputs, batch, stage):
        return outputs.sum()


def test_the_mean_of_checkpoints_is_tested_whatever_the_weights_are_called(tmp_path):
    parts = {"encoder": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)}
    brain = Sums(parts, hparams={"average_checkpoints": 2}, run_opts={"device": "cpu"},
                 checkpointer=Checkpointer(tmp_path, parts))
    for loss in (4.0, 1.0, 2.0):
        for parameter in brain.modules.parameters():
            parameter.data.fill_(loss)
        brain.checkpointer.save_checkpoint(meta={"loss": loss})
    brain.checkpointer.wait()
    brain.on_evaluate_start(**brain.metric.order)
    assert all(torch.equal(parameter, torch.full_like(parameter, 1.5)) for parameter in brain.modules.parameters())


@pytest.mark.parametrize("noise", [False, True])
def test_a_dummy_batch_has_the_tensors_of_one_that_a_loader_makes(noise):
    brain = Sums({"encoder": torch.nn.Linear(2, 2)}, run_opts={"device": "cpu"})
    expected = tensors_by_field(dummy_batch(utterances=2))
    assert tensors_by_field(brain.dummy_batch(2, 1.0, noise=noise)) == expected
    assert tensors_by_field(brain.clip_batch(torch.zeros(16_000), 16_000)) == expected


class Counts(Task):
    """Knows of each number that it evaluates, and says nothing to the hooks of its bases."""

    def compute_forward(self, batch, stage):
        return self.modules.head(batch[:, None])

    def compute_objectives(self, outputs, batch, stage):
        if stage != Stage.TRAIN:
            self.rows += [SimpleNamespace(id=float(number)) for number in batch]
        return outputs.sum()

    def stats(self, rows):
        return {"numbers": len(rows)}

    def on_fit_start(self):
        super().on_fit_start()
        self.seen = []

    def begin_run(self, texts, steps):
        self.planned = texts, steps

    def begin_step(self, step):
        self.seen.append((step, self.optimizer.param_groups[0]["lr"]))

    def validated(self, rows, stats):
        self.seen.append((len(rows), stats["numbers"]))

    def on_stage_start(self, stage, epoch=None):
        self.seen.append(f"begin {stage.name}")

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.seen.append(f"end {stage.name}, {len(self.checkpointer.list_checkpoints())} saved")

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        pass

    def on_step_known(self, facts):
        pass

    def evaluate_batch(self, batch, stage):
        return self.compute_objectives(self.compute_forward(batch, stage), batch, stage).detach()


class Damaged(torch.Tensor, PlannedBatch):
    """A batch one of whose recordings could not be read."""

    damaged = (("b", "b.wav: cut off"),)


def test_a_hook_that_does_not_call_super_loses_nothing(tmp_path):
    net, schedule = torch.nn.Linear(1, 1), Schedule(peak=0.1, warmup=2, shape="linear")
    brain = Counts({"head": net}, partial(torch.optim.SGD, lr=9.0), {"schedule": schedule},
                   {"device": "cpu", "noprogressbar": True}, Checkpointer(tmp_path, {"head": net}))
    brain.open_run(["one"], 4)
    brain.fit([1, 2], torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0]))
    assert brain.planned == (["one"], 4)
    rates = [(step, schedule(step)) for step in range(1, 6)]
    assert brain.seen == [
        rates[0], "begin TRAIN", *rates[1:3], "end TRAIN, 0 saved", "begin VALID", (3, 3), "end VALID, 0 saved",
        "begin TRAIN", *rates[3:], "end TRAIN, 1 saved", "begin VALID", (3, 3), "end VALID, 1 saved"]
    assert len(brain.checkpointer.list_checkpoints()) >= 1


def test_a_scheduler_of_speechbrain_sets_the_rate_of_the_next_step_and_is_saved(tmp_path):
    def brain():
        net, noam = torch.nn.Linear(1, 1), NoamScheduler(0.1, 3)
        return Counts({"head": net}, partial(torch.optim.SGD, lr=9.0), {"schedule": noam},
                      {"device": "cpu", "noprogressbar": True}, Checkpointer(tmp_path, {"head": net}))

    seen = []
    for epochs in ([1], [2, 3]):  # stopped after the first, and resumed
        made = brain()
        made.fit(epochs, torch.tensor([1.0, 2.0]), torch.tensor([3.0]))
        seen += [each for each in made.seen if isinstance(each, tuple) and isinstance(each[1], float)]
    noam, by_hand = NoamScheduler(0.1, 3), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=9.0)
    rates = [9.0, *(noam(by_hand)[1] for _ in range(6))]
    assert [rate for _, rate in seen[:3]] == pytest.approx(rates[:3])
    assert [step for step, _ in seen[3:]] == [3, 4, 5, 6, 7]
    assert [rate for _, rate in seen[4:]] == pytest.approx(rates[3:])  # the first is set when the checkpoint is loaded


@pytest.mark.parametrize(("freeze", "told"), [({"head": 4}, True), ({"head": 3}, False), ({"head.bias": True}, False)])
def test_a_part_that_is_frozen_until_after_the_run_is_named_before_it_starts(freeze, told, caplog):
    brain = Counts({"head": torch.nn.Linear(1, 1)}, partial(torch.optim.SGD, lr=9.0), {"freeze": freeze},
                   {"device": "cpu"})
    brain.open_run(["one"], 4)
    assert ("never trains, because the run has 4 steps: train for more steps (--min_steps 1000), or freeze for fewer" in
            caplog.text) is told


class Silent(TrainLogger):
    """A logger without a state."""

    def log_stats(self, stats_meta, train_stats=None, valid_stats=None, test_stats=None, verbose=False):
        pass


def test_speechbrains_counter_stops_early_and_a_logger_without_a_state_is_no_error(tmp_path):
    def run():
        net = torch.nn.Linear(1, 1)
        counter = EpochCounterWithStopper(9, limit_to_stop=2, limit_warmup=1, direction="max")
        brain = Counts({"head": net}, partial(torch.optim.SGD, lr=9.0),
                       {"epoch_counter": counter, "train_logger": Silent()}, {"device": "cpu", "noprogressbar": True},
                       Checkpointer(tmp_path, {"head": net, "counter": counter}))
        brain.fit(counter, torch.tensor([1.0]), torch.tensor([3.0]))
        brain.checkpointer.wait()
        return counter, brain.seen.count("end TRAIN, 1 saved")

    counter, epochs = run()
    assert counter.should_stop and counter.current == 4 and epochs == 3, "two epochs after the second are no better"
    again, epochs = run()
    assert again.should_stop and again.best_limit == 2 and epochs == 0


@pytest.mark.parametrize(("warmup", "told"), [(8, True), (4, False), (0.9, False)])
def test_a_warm_up_longer_than_the_run_is_told_before_it_starts(warmup, told, caplog):
    brain = Counts({"head": torch.nn.Linear(1, 1)}, partial(torch.optim.SGD, lr=9.0),
                   {"schedule": Schedule(peak=0.1, warmup=warmup)}, {"device": "cpu"})
    brain.open_run(["one"], 4)
    assert ("The warm-up takes 8 steps and the run has 4, so the learning rate reaches only 0.05 of 0.1: use a shorter "
            "one, such as --schedule.warmup 0.2" in caplog.text) is told


@pytest.mark.parametrize("schedule", [NoamScheduler(1.0, 8), InverseSquareRootScheduler(8), NewBobScheduler(1.0)])
def test_so_is_that_of_speechbrains_schedulers(schedule, caplog):
    brain = Counts({"head": torch.nn.Linear(1, 1)}, partial(torch.optim.SGD, lr=9.0), {"schedule": schedule},
                   {"device": "cpu"})
    brain.open_run(["one"], 8)
    assert "warm-up" not in caplog.text
    brain.open_run(["one"], 4)
    assert ("The warm-up takes 8 steps and the run has 4: set a lower schedule." in caplog.text) is not isinstance(
        schedule, NewBobScheduler)


@pytest.mark.parametrize(("peak", "level", "reached"), [(0.2, "WARNING", "0.00125"), (0.002, "INFO", "0.00125"),
                                                        (0.001, "INFO", "0.001"), (0.0001, "", "")])
def test_a_peak_that_rise_keeps_out_of_reach_is_told(peak, level, reached, caplog):
    brain = Counts({"head": torch.nn.Linear(1, 1)}, partial(torch.optim.SGD, lr=9.0),
                   {"schedule": Schedule(peak=peak, warmup=0.1, max_rise_per_step=1.25e-5)}, {"device": "cpu"})
    with caplog.at_level("INFO"):
        brain.open_run(["one"], 200)
    said = [record for record in caplog.records if "rises by at most" in record.message]
    assert [record.levelname for record in said] == [level] * bool(level)
    if said:
        assert f"to {reached} in " in said[0].message
        assert (f"doesn't reach the {peak:g} of the recipe; schedule.max_rise_per_step null removes the limit"
                in said[0].message) is (peak > 0.00125)


def test_recordings_that_could_not_be_read_are_told_where_evaluate_batch_is_a_recipes_own(caplog):
    brain = Counts({"head": torch.nn.Linear(1, 1)}, hparams={"epoch_counter": range(1)}, run_opts={"device": "cpu"})
    brain.on_stage_end = lambda *_: None
    brain.seen = []
    brain.evaluate([torch.tensor([1.0]).as_subclass(Damaged)], test_loader_kwargs={"batch_size": None})
    assert brain.tested.unread == {"b": "b.wav: cut off"} and brain.tested.utterances == 1


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1, 2])


def test_ranks_share_an_ordinary_dataset_so_that_no_row_is_counted_twice(monkeypatch):
    brain = Sums({"head": torch.nn.Linear(2, 1)}, run_opts={"device": "cpu"})
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    evaluated = []
    for rank in range(2):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        evaluated += map(float,
                         loaders.resolve_loader(brain, [0.0, 1.0, 2.0, 3.0, 4.0], Stage.VALID, {"batch_size": 1}))
    assert sorted(evaluated) == [0.0, 1.0, 2.0, 3.0, 4.0]
    with refused("unsplittable-dataset"):
        loaders.resolve_loader(brain, Stream(), Stage.VALID, {})


@pytest.mark.parametrize("asked", [
    lambda task: use_chunks(task, (320, None)),
    lambda task: open_recogniser(Recipe({}, SimpleNamespace(brain=Sums), None), None, "bundle"),
], ids=["chunk", "recogniser"])
def test_a_task_says_what_of_an_evaluation_it_cannot_do(asked):
    brain = Sums({"head": torch.nn.Linear(2, 1)}, run_opts={"device": "cpu"})
    with refused("option-not-for-task"):
        asked(brain)
