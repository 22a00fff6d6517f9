"""Runs of earlier versions open, whatever their recipes call keys and arguments."""

import inspect
import re

import pytest
import run_folders
import torch

from sbkit.data.plan import Batching
from sbkit.nn.chunks import Chunks
from sbkit.nn.codec import FiniteScalars, ResidualVectors
from sbkit.nn.enhance import Enhancer
from sbkit.recipe import load
from sbkit.runs import earlier_recipes, restore
from sbkit.score.weights import ChosenWeights
from sbkit.train.muon import Muon
from sbkit.train.schedule import Schedule

CLASSES = (Batching, Chunks, Enhancer, FiniteScalars, Muon, ResidualVectors, Schedule)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_present_name_is_an_argument_and_no_former_one_is(cls):
    arguments = inspect.signature(cls).parameters
    names = earlier_recipes.ARGUMENTS[cls.__name__]
    assert set(names.values()) <= set(arguments) and not set(names) & set(arguments)
    assert set(earlier_recipes.ARGUMENTS) == {each.__name__ for each in CLASSES}


def renamed(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text)
    return earlier_recipes.rename(load.resolved(tmp_path / "recipe.yaml", {}))


def test_keys_and_arguments_get_their_present_names_and_keep_their_order(tmp_path):
    tree = renamed(tmp_path, """\
most_decibels: 20
rise: 3
tensorboard: true
schedule: !new:sbkit.train.schedule.Schedule {peak: 0.1, rise: 0.5, warmup: 3}
other: !new:mine.Schedule {rise: 0.5}
chunks: !new:sbkit.nn.chunks.Chunks {sizes: [4], left: [8], validate: null, ahead: 2}
""")
    assert list(tree.value) == ["max_db", "rise", "schedule", "other", "chunks", "loggers"]
    assert list(tree.value["schedule"].value) == ["peak", "max_rise_per_step", "warmup"]
    assert list(tree.value["other"].value) == ["rise"], "a class of somebody else"
    assert list(tree.value["chunks"].value) == ["sizes", "left_context", "validate", "lookahead"]
    assert tree.texts()["schedule.max_rise_per_step"] == "0.5" and tree.at("max_db") == 20


def test_a_present_name_wins_over_a_former_one(tmp_path):
    tree = renamed(tmp_path, "batching: !new:sbkit.data.plan.Batching {max_batch_seconds: 9, least_steps: 1, "
                             "min_steps: 2}\n")
    assert tree.at("batching", "min_steps") == 2 and tree.at("batching", "least_steps") is None


@pytest.mark.slow
def test_a_run_whose_recipe_has_former_names_opens_with_its_weights(tmp_path):
    data = run_folders.corpus(tmp_path / "data", train=4, dev=2, test=2)
    (tmp_path / "run").mkdir()
    run = run_folders.run_with_model(tmp_path / "run", data)
    recipe = run / "hyperparams.yaml"
    text = recipe.read_text()
    for names in earlier_recipes.ARGUMENTS.values():
        for former, present in names.items():
            text = re.sub(rf"^( +){present}:", rf"\1{former}:", text, flags=re.MULTILINE)
    assert all(f"    {former}:" in text for former in ("of", "least_steps", "unheard"))
    recipe.write_text(text + "tensorboard: true\n")

    found, brain = restore.load_run(run, "cpu", weights=ChosenWeights("last"))
    saved = torch.load(max((run / "save").glob("CKPT*"), key=lambda path: path.stat().st_mtime_ns) / "model.ckpt",
                       weights_only=True)
    now = brain.hparams.model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in saved.items())
    assert list(found.keys.loggers) == ["tensorboard"] and found.keys.batching.min_steps == 0
