"""A run that is killed while its masks and its rate grow with what it hears ends as the run that was never stopped."""

import processes
import pytest
import torch
from trained_runs import ENVIRONMENT, ROOT, latest, saved_step, weights

from sbkit.runs.restore import read_run
from sbkit.tasks.learning_progress import LearningProgress
from tools.gpu import corpus

BEGIN, WHOLE = 0.05, 0.95
STEPS, STOP = 75, 65  # five epochs, and a step in the last: letters are tones, and some are heard after 50 steps
SMALL = (
    "--d_model 48 --nhead 2 --num_encoder_layers 1 --d_ffn 96 --kernel_size 7 --cnn_first_channels 4 --cnn_channels 8 "
    "--dropout 0 --CNN.dropout 0 --schedule.warmup 30 --lr 0.004 --schedule.max_lr_at_chance 0.0035 --precision fp32 "
    "--num_workers 0 --noprogressbar --no-check --step_seconds 10 --least_steps 0 --number_of_epochs 5 "
    f"--ckpt_interval_minutes 0 --ckpt_interval_steps 2 --spec_augment.ramp [{BEGIN},{WHOLE}]"
).split()

pytestmark = pytest.mark.slow


def words(out, tones):
    return "train", "hparams/ctc.yaml", *SMALL, "--data_folder", tones, "--output_folder", out


def train(out, tones):
    processes.sbkit(*words(out, tones), cwd=ROOT, **ENVIRONMENT)
    return weights(out)


def heard(out):
    """How much the run heard when its newest checkpoint was saved."""
    hearing = LearningProgress()
    hearing.load(latest(out) / "hearing.ckpt", end_of_epoch=False)
    keys = read_run(out).keys
    hearing.chance = keys.tokenizer.entropy(keys.corpus.load()["train"].texts)
    return hearing.score_at(saved_step(out) + 1)


def test_killed_while_the_masks_grow(tmp_path):
    tones = corpus.write(tmp_path / "tones", {"train": 0.03, "dev": 0.004, "test": 0.004}, longest=2.5)
    never_stopped = train(tmp_path / "whole", tones)
    cut = tmp_path / "cut"
    processes.killed(lambda: saved_step(cut) >= STOP, *words(cut, tones), cwd=ROOT, **ENVIRONMENT)
    assert STOP <= saved_step(cut) < STEPS and BEGIN < heard(cut) < WHOLE
    found = train(cut, tones)
    assert saved_step(cut) == STEPS
    assert all(torch.equal(value, found[name]) for name, value in never_stopped.items())
