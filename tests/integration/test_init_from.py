"""Runs that start from a model of ours: ahead of one from nothing, the same on two ranks, and then on their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from processes import program, programs
from run_folders import TINY, corpus
from safetensors.torch import save_file
from starts import spanish

RECIPE = Path(__file__).parents[2] / "hparams" / "ctc.yaml"
OPTIONS = {**TINY, "number_of_epochs": 2, "precision": "fp32", "max_batch_seconds": 8, "step_seconds": 8, "lr": 0.005,
           "schedule.warmup": 3, "schedule.shape": "constant"}


def command(name, *words):
    import importlib
    import sys

    from sbkit.cli import main

    importlib.import_module(f"sbkit.commands.{name}")
    sys.exit(main([name, *words]))


def words(folder, data, **keys):
    said = {**OPTIONS, "output_folder": folder, "data_folder": data, **keys}
    recipe = data.with_suffix(".yaml")
    recipe.write_text(f"recipe: !include:{RECIPE} {{}}\nlog_interval: 0\n")
    return [str(recipe), "--noprogressbar", "--no-check",
            *(word for key, value in said.items() for word in (f"--{key}", str(value)))]


def train(folder, data, **keys):
    ended = program(command, "train", *words(folder, data, **keys), timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return folder, ended.stdout + ended.stderr


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("init_from")
    return {"en": corpus(folder / "en", train=24, dev=2, test=2), "es": spanish(folder / "es", train=12, dev=2, test=2)}


@pytest.fixture(scope="module")
def source(data):
    folder, _ = train(data["en"].parent / "source", data["en"], number_of_epochs=12)
    return folder


@pytest.fixture(scope="module")
def scratch(data):
    folder, _ = train(data["en"].parent / "scratch", data["es"])
    return folder


def kinds(source, folder):
    """What one run gives, in each of its forms."""
    (best,) = source.glob("save/CKPT+*/CKPT.yaml") if len(list(source.glob("save/CKPT+*"))) == 1 else \
        [max(source.glob("save/CKPT+*/CKPT.yaml"))]
    ended = program(command, "export", str(source), "--to", str(folder / "bundle"), "--formats", "speechbrain",
                    "--tolerance", "1", timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    shutil.copytree(folder / "bundle", folder / "asr")
    (folder / "asr" / "config.json").unlink()
    state = torch.load(best.parent / "model.ckpt", weights_only=True)
    heads = ("2.", "3.", "1.custom_tgt")
    save_file({name: value.contiguous() for name, value in state.items() if not name.startswith(heads)},
              folder / "model.safetensors")
    return {"run": source, "checkpoint": best.parent, "bundle": folder / "bundle", "EncoderASR": folder / "asr",
            "safetensors": folder / "model.safetensors"}


@pytest.mark.slow
def test_each_kind_of_source_is_ahead_of_nothing_in_another_vocabulary(source, scratch, data, tmp_path):
    from_nothing = losses(scratch)
    for name, path in kinds(source, tmp_path).items():
        folder, said = train(tmp_path / f"from {name}", data["es"], init_from=path)
        found = losses(folder)
        assert len(found) == len(from_nothing) and "Starting from the " in said
        assert sum(found) < sum(from_nothing), (name, found, from_nothing)


@pytest.mark.slow
def test_two_ranks_start_alike_and_as_one_does(source, data, tmp_path):
    keys = {"init_from": source, "dropout": 0, "CNN.dropout": 0, "spec_augment": "null"}
    one, _ = train(tmp_path / "one", data["es"], **keys)
    both = programs(2, command, "train", *words(tmp_path / "two", data["es"], **keys), timeout=300)
    assert [each.returncode for each in both] == [0, 0], both[0].stderr[-2000:]
    assert losses(tmp_path / "two") == pytest.approx(losses(one), rel=1e-3)
    assert losses(tmp_path / "two")[0] == pytest.approx(losses(one)[0], rel=1e-5)


@pytest.mark.slow
def test_once_it_has_a_checkpoint_a_run_does_without_its_source(source, data, tmp_path):
    lent = Path(shutil.copytree(source, tmp_path / "lent"))
    keys = {"init_from": lent, "init_tokenizer": "keep", "freeze": "{CNN: true, Transformer.encoder: 3}"}
    folder, _ = train(tmp_path / "run", data["en"], number_of_epochs=1, **keys)
    shutil.rmtree(lent)
    _, said = train(folder, data["en"], number_of_epochs=2, **keys)
    assert "Starting from" not in said
    recipe = (folder / "hyperparams.yaml").read_bytes()
    other = program(command, "train", *words(folder, data["en"], **{**keys, "init_from": source}), timeout=300)
    assert other.returncode == 2
    assert f"init_from: it is {source}, but the run in {folder} was last started with" in other.stderr
    assert (folder / "hyperparams.yaml").read_bytes() == recipe
    for name, *more in (("evaluate", "--split", "test"), ("export", "--to", str(tmp_path / "out"), "--tolerance", "1",
                                                          "--formats", "speechbrain")):
        ended = program(command, name, str(folder), *more, timeout=300)
        assert ended.returncode == 0, ended.stderr[-2000:]
    again = program(command, "train", *words(tmp_path / "other", data["en"], **keys), timeout=300)
    assert again.returncode == 2 and "lent doesn't exist" in again.stderr
