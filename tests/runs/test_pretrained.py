"""A recipe's pretrainer: what it names is there before training begins, and nothing in it is run."""

import logging
import os
from pathlib import Path

import processes
import pytest
import run_folders
import torch
from refusals import refused
from safetensors.torch import save_file
from speechbrain.utils.parameter_transfer import Pretrainer
from torch import nn

from sbkit.errors import SbkitError
from sbkit.runs import pretrained, restore

ROOT = Path(__file__).parents[2]


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harm",)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With the weights of a layer, in two forms, and files that are none; it is the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").mkdir()
    state = {"weight": torch.full((3, 2), 7.0), "bias": torch.full((3,), 5.0)}
    torch.save(state, "source/layer.ckpt")
    torch.save({"weight": state["weight"], "other": state["bias"]}, "source/part.ckpt")
    torch.save({"weight": torch.zeros(4, 2), "bias": torch.zeros(4)}, "source/wide.ckpt")
    torch.save({"left": torch.zeros(1)}, "source/alien.ckpt")
    torch.save({"weight": Harmful()}, "source/harm.ckpt")
    (tmp_path / "source" / "text.ckpt").write_text("no tensors")
    return tmp_path


def load(path, layer=None, **options):
    layer = nn.Linear(2, 3) if layer is None else layer
    pretrained.load(Pretrainer(loadables={"layer": layer}, paths={"layer": str(path)}, **options))
    return layer


@pytest.mark.parametrize("collected", [False, True])
def test_weights_of_a_local_file_are_loaded(folder, collected):
    options = {"collect_in": folder / "run" / "save" / "pretrained"} if collected else {}
    layer = load(folder / "source" / "layer.ckpt", **options)
    assert (layer.weight == 7).all() and (layer.bias == 5).all()
    assert not collected or (options["collect_in"] / "layer.ckpt").exists()


def test_what_is_collected_is_what_the_recipe_names_now(folder):
    load("source/layer.ckpt", collect_in="kept")
    torch.save({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, "source/newer.ckpt")
    assert (load("source/newer.ckpt", collect_in="kept").weight == 1).all()


def test_a_part_of_the_weights_is_told(folder, caplog):
    with caplog.at_level(logging.WARNING):
        layer = load("source/part.ckpt")
    assert (layer.weight == 7).all() and not (layer.bias == 5).any()
    assert ["bias" in caplog.text, "other" in caplog.text] == [True, True]


@pytest.mark.parametrize("name, code", [
    ("source/nowhere.ckpt", "missing-file"), ("/no/such/layer.ckpt", "missing-file"),
    ("source/wide.ckpt", "other-model"), ("source/alien.ckpt", "no-matching-weights"),
    ("source/harm.ckpt", "unsafe-file"), ("source/text.ckpt", "damaged-file")])
def test_a_file_that_can_t_be_used_is_one_message(folder, name, code):
    with refused(code, key="pretrainer", wording=code != "damaged-file") as error:  # torch's words differ by release
        load(name)
    assert name in error.value.message and "\n" not in error.value.message
    assert not (folder / "harm").exists()


def test_the_weights_of_a_bundle_are_told_from_harmful_ones(folder):
    save_file({"weight": torch.ones(3, 2)}, "source/bundle.ckpt")
    with refused("state-not-loaded"):
        load("source/bundle.ckpt")


def test_a_loadable_without_a_path_is_named(folder):
    with pytest.raises(SbkitError, match="there is no path for layer"):
        pretrained.fetch(Pretrainer(loadables={"layer": nn.Linear(2, 3)}))


def test_conditions_and_hooks_are_the_recipes(folder):
    layer, seen = nn.Linear(2, 3), []
    pretrained.load(Pretrainer(
        loadables={"layer": layer, "other": layer}, paths={"layer": "source/layer.ckpt"},
        conditions={"other": False}, custom_hooks={"layer": lambda obj, path: seen.append((obj, Path(path).name))}))
    assert seen == [(layer, "layer.ckpt")]


def test_what_a_checkpoint_holds_needs_no_source(folder):
    layer, frozen = nn.Linear(2, 3), nn.Linear(2, 3)
    given = Pretrainer(loadables={"frozen": frozen, "layer": layer},
                       paths={"frozen": "source/layer.ckpt", "layer": "source/layer.ckpt"})
    pretrained.load(given, pretrained.saved_ids([nn.Sequential(layer)]))
    assert (frozen.weight == 7).all() and not (layer.weight == 7).any()
    os.remove("source/layer.ckpt")
    pretrained.load(given, pretrained.saved_ids([nn.Sequential(layer), frozen]))


def head(size, value):
    return {"w.weight": torch.full((size, 16), value), "w.bias": torch.full((size,), value)}


def start(recipe, *words, code=0):
    return processes.sbkit("train", recipe, "--noprogressbar", *words, cwd=recipe.parent, code=code).stderr


@pytest.mark.slow
def test_a_run_begins_with_them_and_goes_on_with_its_own(tmp_path):
    data, out = run_folders.corpus(tmp_path / "data", train=6, dev=2, test=2), tmp_path / "run"
    text = (ROOT / "tests" / "recipe" / "small.yaml").read_text().replace("lr: 0.001", "lr: 0.0")
    recipe = tmp_path / "small.yaml"
    recipe.write_text(f"""{text}
pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer
    collect_in: !ref <output_folder>/pretrained
    loadables: {{head: !ref <seq_lin>}}
    paths: {{head: {tmp_path}/head.ckpt}}
number_of_epochs: 1
""".replace("limit: 2", "limit: !ref <number_of_epochs>"))
    words = ["--output_folder", str(out), "--data_folder", str(data), "--tokenizer.model_type", "char", "--no-check"]
    refused = start(recipe, *words, code=2)
    assert f"there is no file {tmp_path}/head.ckpt" in refused
    assert "Traceback" not in refused and not (out / "manifests").exists()
    torch.save(head(20, 7.0), tmp_path / "head.ckpt")
    refused = start(recipe, *words, code=2)
    assert "comes from a model of different sizes" in refused
    size = int(refused.split("output_neurons: ")[1].split(",")[0])  # as many as the corpus has characters
    torch.save(head(size, 7.0), tmp_path / "head.ckpt")
    start(recipe, *words)
    torch.save(head(size, 0.0), tmp_path / "head.ckpt")
    start(recipe, *words, "--number_of_epochs", "2")
    os.remove(tmp_path / "head.ckpt")
    recipe, _ = restore.load_run(out, "cpu")  # all of it is in the checkpoint
    assert all((parameter == 7).all() for parameter in recipe.keys.seq_lin.parameters())
