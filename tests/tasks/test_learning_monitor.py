"""What every recogniser does around its loss: here, telling what its error rates are without."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from batches import noise
from refusals import refused
from speechbrain.core import Stage

from sbkit.data.batch import Batch, dummy_batch
from sbkit.nn.spec_augment import SpecAugment
from sbkit.score.report.data import read
from sbkit.score.report.findings import findings
from sbkit.tasks.keys import RecogniserKeys
from sbkit.tasks.learning import LearningMonitor
from sbkit.tasks.learning_progress import LAG
from sbkit.tasks.recognise.transcripts import ASRResults, TranscribedUtterance, rates_by_name, score
from sbkit.tasks.task import Metric, Task
from sbkit.train.averaging import EMA
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.results import StepResult
from sbkit.train.schedule import Schedule
from sbkit.train.train_log import TrainLog


class Parrot(Task):
    """Hears what was said."""

    Keys = RecogniserKeys
    metric = Metric("WER")
    loss_of_tokens = "spelling"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.learning = LearningMonitor(self.loss_of_tokens, self.keys, self.checkpointer)

    def stats(self, rows):
        return rates_by_name(rows)

    def results(self, rows, loss, unread):
        return ASRResults.of(rows, loss, unread)

    def estimate(self, rows):
        return None

    def compute_forward(self, batch, stage):
        return batch.signals

    def compute_objectives(self, signals, batch, stage):
        if batch.weight:
            self.rows += [TranscribedUtterance(name, text, text) for name,
                          text in zip(batch.ids, batch.texts, strict=True)]
        return signals.sum()


def batch(name: str, **more) -> Batch:
    return noise(4, tokens=[[1]], ids=[name], texts=["yes"], **more)


class Share:
    """This rank's batches of a set, as our loader has them."""

    def __init__(self, *batches: Batch):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def run_test(folder, *batches):
    hparams = {"train_logger": TrainLog(folder / "train_log.txt"), "epoch_counter": SimpleNamespace(current=3)}
    brain = Parrot({"layer": torch.nn.Linear(1, 1)}, hparams=hparams, run_opts={"device": "cpu"})
    brain.metrics_log = MetricsLog(folder)
    brain.evaluate(Share(*batches), progressbar=False)
    brain.metrics_log.flush()
    return brain, (folder / "train_log.txt").read_text(), json.loads((folder / "metrics.jsonl").read_text())


def test_test_clips_that_could_not_be_read_are_told_wherever_the_rate_is(tmp_path, caplog):
    cut_off, gone = ("b", "b.mp3: cut off"), ("c", "c.mp3: no such file")
    brain, log, line = run_test(tmp_path, batch("a", damaged=[cut_off]), dummy_batch(damaged=[gone]))
    assert brain.tested.words.rate == 0 and brain.tested.unread == dict([cut_off, gone])
    assert "test unread: 2" in log and line["test_unread"] == 2
    assert ("2 of 3 test utterances could not be read and are not scored: b.mp3: cut off; c.mp3: no such file"
            in caplog.text)
    first = findings(read_run(tmp_path))[0]
    assert first.headline == "2 test utterances could not be read: no rate here includes them"


def test_nothing_is_said_where_all_were_read(tmp_path, caplog):
    brain, log, line = run_test(tmp_path, batch("a"), batch("b"))
    assert brain.tested.unread == {} and "unread" not in log + str(line) + caplog.text
    assert not findings(read_run(tmp_path))


def read_run(folder):
    (folder / "hyperparams.yaml").write_text("")
    return read(folder)


def test_validation_tells_too(tmp_path, caplog):
    brain, *_ = run_test(tmp_path, batch("a"))
    brain.close_stage(Stage.TRAIN, 0.0, 1)
    brain.open_stage(Stage.VALID, 1)
    brain.pass_over(Share(batch("a", damaged=[("b", "b.mp3: empty")])), Stage.VALID, "valid", False)
    brain.close_stage(Stage.VALID, 0.0, 1)
    assert "valid unread: 1" in (tmp_path / "train_log.txt").read_text()


def test_a_metric_that_validation_lacks_is_named_once_the_epoch_is_saved(tmp_path):
    class Mistaken(Parrot):
        metric = Metric("wer")

    layer = torch.nn.Linear(1, 1)
    shelf = Checkpointer(tmp_path, {"model": layer})
    brain = Mistaken({"layer": layer}, run_opts={"device": "cpu"}, checkpointer=shelf)
    brain.close_stage(Stage.TRAIN, 0.0, 1)
    brain.open_stage(Stage.VALID, 1)
    brain.evaluate_batch(batch("a"), Stage.VALID)
    with refused("metric"):
        brain.close_stage(Stage.VALID, 0.0, 1)
    assert [ckpt.meta["epoch"] for ckpt in shelf.list_checkpoints()] == [1]


def test_a_script_of_ones_own_is_told_of_two_averages_before_it_trains():
    """A recipe is told by its check."""
    net = torch.nn.Linear(2, 2)
    with refused("clash"):
        Parrot({"net": net}, hparams={"ema": EMA(net, 0.9), "average_checkpoints": 2}, run_opts={"device": "cpu"})
    Parrot({"net": net}, hparams={"ema": EMA(net, 0.0), "average_checkpoints": 2}, run_opts={"device": "cpu"})


def test_what_has_no_reference_is_named_and_not_scored(caplog):
    rows = [TranscribedUtterance("a", "", "uh uh uh"), TranscribedUtterance("b", "one two", "one"),
            TranscribedUtterance("c", " ", ""), TranscribedUtterance("d", "six ten", "six ten")]
    words, characters = score(rows)
    assert words.ids == characters.ids == ["b", "d"]
    assert words.rate == 25.0 and characters.rate == pytest.approx(100 * 4 / 14)
    assert "2 utterances have no reference and are not scored: a, c" in caplog.text
    caplog.clear()
    assert len(score(rows[1:2])[0]) == 1 and not caplog.text


TOKENS = {"tokenizer": SimpleNamespace(entropy=lambda texts: 3.0)}


def following(folder, chance=3.0, task=Parrot):
    """A brain whose masks and learning rate follow its learning progress, and its masks."""
    masks, layer = SpecAugment(ramp=[0.2, 0.6]), torch.nn.Linear(1, 1)
    shelf = Checkpointer(folder, {"model": layer})
    schedule = Schedule(peak=0.003, warmup=1, shape="constant", max_lr_at_chance=0.001)
    brain = task({"layer": layer}, partial(torch.optim.SGD, lr=9.0), {"spec_augment": masks, "schedule": schedule},
                 run_opts={"device": "cpu"}, checkpointer=shelf)
    brain.learning.progress.chance = chance
    return brain, masks


def begin(brain):
    """As ``fit`` does."""
    brain.on_fit_start()
    brain.open_step(brain.optimizer_step + 1)


def facts(step, loss, part="spelling"):
    return StepResult(99.0 * loss, 7.0, 1.0, False, 1.0, 1.0, {part: (4.0 * loss, 4.0)}, [], number=step, late=0)


def test_masks_follow_what_is_heard_by_the_tokens_part_of_the_loss_and_so_after_resuming(tmp_path):
    brain, masks = following(tmp_path)
    begin(brain)
    assert masks.strength == 0.0 and brain.learning_rate == 0.001
    for step in range(1, 60):
        brain.close_step(facts(step, 1.8))
        brain.optimizer_step = step
        brain.open_step(step + 1)
    assert masks.strength == pytest.approx(0.5)  # 1.8 of 3.0: a score of 0.4, half way from 0.2 to 0.6
    assert brain.learning_rate == pytest.approx(0.003)
    brain.close_step(facts(60, 0.3))  # known already, and not followed yet
    brain.checkpointer.save_checkpoint(meta={"WER": 50.0})
    brain.checkpointer.wait()

    again, others = following(tmp_path)
    begin(again)
    assert others.strength == pytest.approx(0.5) and again.learning_rate == pytest.approx(0.003)
    for each, mask in ((brain, masks), (again, others)):
        each.optimizer_step = 62
        each.open_step(63)
        assert mask.strength == pytest.approx(0.5 + 0.05 * 0.5 / 0.4)


def test_without_a_chance_masks_are_whole(tmp_path):
    brain, masks = following(tmp_path, chance=float("nan"))
    begin(brain)
    assert masks.strength == 1.0 and brain.learning_rate == 0.003


def test_masks_are_whole_where_the_loss_has_no_part_to_compare_with_chance(tmp_path):
    brain, masks = following(tmp_path)
    begin(brain)
    for step in range(1, 60):
        brain.close_step(facts(step, 3.1, part="another"))
        brain.optimizer_step = step
        brain.open_step(step + 1)
        assert masks.strength == float(step >= LAG), step  # it isn't known before the first loss is
    brain.checkpointer.save_checkpoint(meta={"WER": 50.0})
    brain.checkpointer.wait()
    again, others = following(tmp_path)
    begin(again)
    assert others.strength == 1.0


def test_a_task_that_names_no_such_part_has_whole_masks_from_its_first_step(tmp_path):
    class Silent(Parrot):
        loss_of_tokens = None

    for task, strength in ((Parrot, 0.0), (Silent, 1.0)):
        brain, masks = following(tmp_path / task.__name__, float("nan"), task)
        vars(brain.keys).update(TOKENS)
        brain.open_run(["yes"], 9)
        begin(brain)
        assert masks.strength == strength


class OwnStep(Parrot):
    """Updates by itself, in SpeechBrain's loop, which reports no losses of steps."""

    def optimizers_step(self):
        super().optimizers_step()


def test_masks_and_rate_are_whole_where_an_overridden_step_reports_no_losses(tmp_path):
    brain, masks = following(tmp_path, float("nan"), OwnStep)
    vars(brain.keys).update(TOKENS)
    brain.open_run(["yes"], 9)
    begin(brain)
    assert masks.strength == 1.0 and brain.learning_rate == 0.003


class Thermostat(Parrot):
    """Sets the rate of its optimizer itself, in a hook of its own."""

    def begin_step(self, step):
        self.optimizer.param_groups[0]["lr"] = step * 1e-6


def test_what_a_recipe_does_with_its_rate_and_its_parts_is_known_to_its_notices():
    layer = torch.nn.Linear(1, 1)
    hparams = {"freeze": {"layer.weight": 30, "layer.bias": 20}, "learning_rates": {"layer": {"bias": 7}}}
    opt = {"opt_class": lambda params: torch.optim.SGD(params, lr=1.0)}
    brain = Thermostat({"layer": layer}, hparams=hparams, run_opts={"device": "cpu"}, **opt)
    vars(brain.keys).update(TOKENS)
    brain.open_run(["yes"], 9000)
    assert brain.learning.notices.setup.thaw == 30 and brain.learning.notices.setup.schedule is None
    assert brain.learning.notices.setup.fastest == 7 and brain.learning.notices.setup.freezes
    begin(brain)
    brain.open_step(2)
    assert brain.trainer.learning_rate == 2e-6
