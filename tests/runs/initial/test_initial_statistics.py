"""A normalisation that has counted a corpus goes on from there; files that hold no tensors stay where they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from run_folders import run_with_model
from speechbrain.processing.features import InputNormalization
from starts import RECIPE, lines_of, started

GLOBAL = {"normalize": {"norm_type": "global"}}
OVERLAY = f"""
recipe: !include:{RECIPE}
    checkpointer: !new:sbkit.train.checkpoint.Checkpointer
        checkpoints_dir: !ref <save_folder>
        recoverables:
            model: !ref <model>
            normalizer: !ref <normalize>
            counter: !ref <epoch_counter>
"""


@pytest.fixture(scope="module")
def norm():
    """SpeechBrain's own, which has heard something."""
    made = InputNormalization(norm_type="global")
    made(torch.randn(4, 50, 80) * 3 - 7)
    return made


@pytest.fixture(scope="module")
def folder(bundle, norm, tmp_path_factory):
    """As SpeechBrain's recipes for EncoderASR leave it: statistics in normalizer.ckpt, and an encoder of texts."""
    made = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("statistics") / "asr"))
    (made / "config.json").unlink()
    text = (made / "hyperparams.yaml").read_text()
    assert text.count("loadables:\n") == 1 and text.count("\npretrainer:") == 1
    text = text.replace("loadables:\n", "loadables:\n        normalizer: !ref <normalize>\n"
                        "        labels: !ref <labels>\n")
    text = text.replace("\npretrainer:", "\nlabels: !new:speechbrain.dataio.encoder.CTCTextEncoder\npretrainer:")
    (made / "hyperparams.yaml").write_text(text)
    norm._save(made / "normalizer.ckpt")
    (made / "labels.ckpt").write_text("'a' => 1\n")
    return made


def begun(tmp_path, data, caplog, **keys):
    """The normalisation of a run that has begun, and the rows of its table."""
    brain, _, table = started(tmp_path / "new", data, caplog, **keys)
    return brain.hparams.normalize, lines_of(table)


@pytest.mark.slow
def test_an_encoderasr_folder_gives_its_statistics(folder, norm, english, tmp_path, caplog):
    own, rows = begun(tmp_path, english, caplog, init_from=str(folder), **GLOBAL)
    assert own.count == norm.count
    assert torch.equal(own.glob_mean, norm.glob_mean) and torch.equal(own.glob_std, norm.glob_std)
    assert "normalize 161 taken running statistics" in rows
    assert "labels 0 left there no tensors in its file" in rows


def test_where_nothing_counts_them_they_are_left_there(folder, english, tmp_path, caplog):
    own, rows = begun(tmp_path, english, caplog, init_from=str(folder), normalize={"norm_type": "sentence"})
    assert own.count == 0 and "normalize 161 left there not in this model" in rows


def test_what_is_named_has_the_statistics_of_its_own_corpus(folder, norm, english, tmp_path, caplog):
    own, rows = begun(tmp_path, english, caplog, init_from=str(folder), init_leave=["normalize"], **GLOBAL)
    assert own.count not in (0, norm.count) and "normalize 161 left there init_leave" in rows


@pytest.mark.slow
@pytest.mark.parametrize("average", [1, 2])
def test_a_run_gives_those_of_its_best_checkpoint(norm, english, tmp_path, caplog, average):
    path = tmp_path / "global.yaml"
    path.write_text(OVERLAY)
    run = run_with_model(tmp_path / "run", english, recipe=path, rates=(70.0, 40.0), **GLOBAL)
    for epoch, mean in ((1, 3.0), (2, 5.0)):
        (checkpoint,) = run.glob(f"save/*epoch{epoch}*")
        torch.save({"count": 7, "glob_mean": torch.full((80,), mean), "glob_std": torch.ones(80)},
                   checkpoint / "normalizer.ckpt")
        next(checkpoint.glob("*sums.json")).unlink()
    own, rows = begun(tmp_path, english, caplog, recipe=path, init_from=str(run), init_average=average, **GLOBAL)
    assert own.count == 7 and torch.equal(own.glob_mean, torch.full((80,), 5.0))
    assert "normalize 161 taken running statistics" in rows
