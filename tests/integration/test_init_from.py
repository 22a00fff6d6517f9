"""Runs that start from a model of ours: ahead of one from nothing, and then on their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from processes import ROOT, sbkit
from run_folders import TINY, corpus
from starts import spanish
from trained_runs import metrics, options

OPTIONS = {**TINY, "number_of_epochs": 2, "precision": "fp32", "max_batch_seconds": 8, "step_seconds": 8, "lr": 0.005,
           "schedule.warmup": 3, "schedule.shape": "constant"}


def train(folder, data, code=0, **keys):
    recipe = data.with_suffix(".yaml")
    recipe.write_text(f"recipe: !include:{ROOT}/hparams/ctc.yaml {{}}\nlog_interval: 0\n")
    given = options(**{**OPTIONS, "output_folder": folder, "data_folder": data, **keys})
    done = sbkit("train", recipe, "--noprogressbar", "--no-check", *given, code=code, cards=True)
    return done.stdout + done.stderr


def losses(folder):
    return [line["loss"] for line in metrics(folder, "step")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("init_from")
    return {"en": corpus(folder / "en", train=24, dev=2, test=2), "es": spanish(folder / "es", train=12, dev=2, test=2)}


@pytest.fixture(scope="module")
def source(data):
    folder = data["en"].parent / "source"
    train(folder, data["en"], number_of_epochs=12)
    return folder


@pytest.fixture(scope="module")
def scratch(data):
    folder = data["en"].parent / "scratch"
    train(folder, data["es"])
    return folder


@pytest.mark.slow
def test_a_run_is_ahead_of_nothing_in_another_vocabulary(source, scratch, data, tmp_path):
    """tests/runs/initial has the other kinds of sources, whose weights are the same."""
    assert "Starting from the " in train(tmp_path / "run", data["es"], init_from=source)
    found, from_nothing = losses(tmp_path / "run"), losses(scratch)
    assert len(found) == len(from_nothing) and sum(found) < sum(from_nothing), (found, from_nothing)


@pytest.mark.slow
def test_once_it_has_a_checkpoint_a_run_does_without_its_source(source, data, tmp_path):
    lent = Path(shutil.copytree(source, tmp_path / "lent"))
    keys = {"init_from": lent, "init_tokenizer": "keep", "freeze": "{CNN: true, Transformer.encoder: 3}"}
    folder = tmp_path / "run"
    train(folder, data["en"], number_of_epochs=1, **keys)
    shutil.rmtree(lent)
    assert "Starting from" not in train(folder, data["en"], **keys)
    recipe = (folder / "hyperparams.yaml").read_bytes()
    said = train(folder, data["en"], code=2, **{**keys, "init_from": source})
    assert f"init_from: it is {source}, but the run in {folder} was last started with" in said
    assert (folder / "hyperparams.yaml").read_bytes() == recipe
    sbkit("evaluate", folder, "--split", "test", "--device", "cpu", "--workers", 0)
    assert "lent doesn't exist" in train(tmp_path / "other", data["en"], code=2, **keys)
