"""What a run has learnt: without anything, it says so as it ends and first of all in its report; and stopped while
masks and rate grow with it, it ends as the run that was never stopped.
"""

import pytest
from processes import sbkit
from trained_runs import copied, different, go_on, here, latest, metrics, outcome, saved_step

from sbkit.runs.restore import read_run
from sbkit.score.report import write_report
from sbkit.score.report.data import read
from sbkit.score.report.findings import findings
from sbkit.tasks.learning_progress import LearningProgress
from tools.gpu import corpus

SMALL = (
    "--d_model 48 --nhead 2 --num_encoder_layers 1 --d_ffn 96 --kernel_size 7 --cnn_first_channels 4 --cnn_channels 8 "
    "--dropout 0 --CNN.dropout 0 --schedule.warmup 30 --precision fp32 --num_workers 0 --noprogressbar --no-check "
    "--step_seconds 10 --min_steps 0 --ckpt_interval_minutes 0 --log_interval 0"
).split()
BEGIN, WHOLE = 0.05, 0.95
STEPS, STOP = 75, 65  # five epochs, and a step in the last: letters are tones, and some are heard after 50 steps
RAMP = ("--lr 0.004 --schedule.max_lr_at_chance 0.0035 --number_of_epochs 5 --ckpt_interval_steps 2 "
        f"--spec_augment.ramp [{BEGIN},{WHOLE}]").split()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tones(tmp_path_factory):
    """A corpus in which each letter is a tone: a small model learns to read it within some hundred steps."""
    return corpus.write(tmp_path_factory.mktemp("tones"), {"train": 0.03, "dev": 0.004, "test": 0.004}, longest=2.5)


def words(out, tones, *more):
    return "train", "hparams/ctc.yaml", *SMALL, "--data_folder", tones, "--output_folder", out, *more


def train(out, tones, *more, ranks=1):
    done = sbkit(*words(out, tones, "--spec_augment", "null", *more), ranks=ranks, timeout=590)
    return done.stderr, metrics(out, "warning")


@pytest.mark.long
def test_one_that_can_learn_nothing_is_warned_at_its_end(tones, tmp_path):
    out = tmp_path / "run"
    said, lines = train(out, tones, "--lr", "1e-6", "--number_of_epochs", "2", ranks=2)
    notice = "the model has learnt nothing yet [nothing-learnt]. The loss is"
    assert said.count(notice) == 1
    assert [(line["code"], line["holds"]) for line in lines] == [("nothing-learnt", True)]
    assert "above chance" in lines[0]["detail"]
    assert (out / "log.txt").read_text().count(notice) == 1
    first = findings(read(out))[0]
    assert first.headline == "The model has learnt nothing yet"
    assert "--lr 0.002" in first.detail
    page = write_report(out).read_text()
    assert page.index(first.headline) < page.index("Training</h2>")


@pytest.mark.long
def test_one_that_learns_gets_no_notice_and_a_longer_plan_makes_good_for_a_shorter_one(tones, tmp_path):
    out = tmp_path / "run"
    said, lines = train(out, tones, "--number_of_epochs", "2")
    assert "the model has learnt nothing" in said and lines[-1]["holds"]
    said, lines = train(out, tones, "--number_of_epochs", "10")
    assert not [one for one in findings(read(out)) if "learnt" in one.headline.lower()]
    thrice = ("--lr", "0.009")  # the recipe's
    said, lines = train(tmp_path / "other", tones, "--number_of_epochs", "10", *thrice)
    assert not lines and "What to try" not in said


def learnt(out):
    """How much the run had learnt when its newest checkpoint was saved."""
    progress = LearningProgress()
    progress.load(latest(out) / "hearing.ckpt", end_of_epoch=False)
    keys = read_run(out).keys
    progress.chance = keys.tokenizer.entropy(keys.corpus.load()["train"].texts)
    return progress.score_at(saved_step(out) + 1)


def everything(out):
    """All that training left, but for times."""
    return outcome(out, "valid_WER", "test_WER", kinds=("step", "epoch", "test")) | {
        "log": (out / "train_log.txt").read_text(), "wer": (out / "wer_test.txt").read_text()}


@pytest.mark.long
def test_stopped_while_the_masks_grow_it_ends_as_the_run_that_was_never_stopped(tones, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with copied(whole, STOP, cut):
        here(*words(whole, tones, *RAMP))
    assert STOP <= saved_step(cut) < STEPS and BEGIN < learnt(cut) < WHOLE
    go_on(cut, *words(cut, tones, *RAMP))
    assert saved_step(cut) == STEPS and different(everything(cut), everything(whole)) == []
