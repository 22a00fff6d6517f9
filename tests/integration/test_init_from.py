"""A run that starts from one of ours is soon on its own."""

from __future__ import annotations

import shutil

import pytest
from processes import ROOT, sbkit
from run_folders import TINY, corpus
from trained_runs import options

OPTIONS = {**TINY, "precision": "fp32", "max_batch_seconds": 8, "step_seconds": 8}


def train(folder, data, code=0, **keys):
    given = options(**{**OPTIONS, "output_folder": folder, "data_folder": data, **keys})
    done = sbkit("train", ROOT / "hparams" / "ctc.yaml", "--noprogressbar", "--no-check", *given, code=code, cards=True)
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_once_it_has_a_checkpoint_a_run_does_without_its_source(tmp_path):
    """tests/runs/initial has the kinds of sources and what is taken from them."""
    data, source, lent, folder = (tmp_path / name for name in ("data", "source", "lent", "run"))
    corpus(data, train=24, dev=2, test=2)
    train(source, data, number_of_epochs=1)
    shutil.copytree(source, lent)
    keys = {"init_from": lent, "init_tokenizer": "keep", "freeze": "{CNN: true, Transformer.encoder: 3}"}
    assert "Starting from the " in train(folder, data, number_of_epochs=1, **keys)
    shutil.rmtree(lent)
    assert "Starting from" not in train(folder, data, number_of_epochs=2, **keys)
    recipe = (folder / "hyperparams.yaml").read_bytes()
    said = train(folder, data, code=2, **{**keys, "init_from": source})
    assert f"init_from: it is {source}, but the run in {folder} was last started with" in said
    assert (folder / "hyperparams.yaml").read_bytes() == recipe
    sbkit("evaluate", folder, "--split", "test", "--device", "cpu", "--workers", 0)
    assert "lent doesn't exist" in train(tmp_path / "other", data, code=2, **keys)
