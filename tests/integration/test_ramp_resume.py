"""A run that is killed while its masks and its rate grow with what it hears ends as the run that was never stopped."""

from pathlib import Path

import processes
import pytest
import torch
import yaml

from sbkit.runs.restore import read_run
from sbkit.tasks.learning_progress import LearningProgress
from tools.gpu import corpus

ROOT = Path(__file__).resolve().parents[2]
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
    processes.sbkit(*words(out, tones), cwd=ROOT, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    return torch.load(saved(out)[steps(out)] / "model.ckpt", weights_only=True)


def saved(out):
    """The checkpoints by their steps."""
    found = {}
    for path in out.glob("save/CKPT+*"):
        try:
            found[yaml.safe_load((path / "brain.ckpt").read_text())["optimizer_step"]] = path
        except FileNotFoundError:  # it has just been deleted
            continue
    return found


def steps(out):
    return max(saved(out), default=0)


def heard(out):
    """How much the run heard when its newest checkpoint was saved."""
    hearing = LearningProgress()
    hearing.load(saved(out)[steps(out)] / "hearing.ckpt", end_of_epoch=False)
    keys = read_run(out).keys
    hearing.chance = keys.tokenizer.entropy(keys.corpus.load()["train"].texts)
    return hearing.score_at(steps(out) + 1)


def test_killed_while_the_masks_grow(tmp_path):
    tones = corpus.write(tmp_path / "tones", {"train": 0.03, "dev": 0.004, "test": 0.004}, longest=2.5)
    never_stopped = train(tmp_path / "whole", tones)
    cut = tmp_path / "cut"
    processes.killed(lambda: steps(cut) >= STOP, *words(cut, tones), cwd=ROOT, OMP_NUM_THREADS="1",
                     CUDA_VISIBLE_DEVICES="")
    assert STOP <= steps(cut) < STEPS and BEGIN < heard(cut) < WHOLE
    found = train(cut, tones)
    assert steps(cut) == STEPS
    assert all(torch.equal(value, found[name]) for name, value in never_stopped.items())
