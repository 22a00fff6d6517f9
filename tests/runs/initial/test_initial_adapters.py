"""What LoRA has trained is where another run starts: merged into a plain model, as it is in one with the same LoRA."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from refusals import refused
from run_folders import run_with_model
from starts import RECIPE, started, state, target

from sbkit.nn import adapters
from sbkit.runs import initial
from sbkit.runs.restore import load_run
from sbkit.score.weights import ChosenWeights, Mean

OVERLAY = """
recipe: !include:{recipe}
    adapters: !new:sbkit.nn.adapters.LoRA
        module: !ref <Transformer>
        targets: ["encoder.layers.*.ffn.0", "custom_src_module.layers.0.w"]
        rank: {rank}
        alpha: 5
    trained: !new:sbkit.train.checkpoint.adapted.Adapted
        model: !ref <model>
        base: !ref <adapters>
        folder: !ref <save_folder>
    checkpointer: !new:sbkit.train.checkpoint.Checkpointer
        checkpoints_dir: !ref <save_folder>
        recoverables:
            model: !ref <trained>
            counter: !ref <epoch_counter>
"""


def overlay(folder, rank=2):
    path = folder / f"lora{rank}.yaml"
    path.write_text(OVERLAY.format(recipe=RECIPE, rank=rank))
    return path


@pytest.fixture(scope="module")
def run(english, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    return run_with_model(folder / "run", english, recipe=overlay(folder))


def merged(run, **chosen):
    """The whole model of a run, its adapters in it."""
    _, brain = load_run(run, "cpu", **chosen)
    assert adapters.merge(brain.modules) == 3
    return state(brain)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
def test_a_plain_recipe_takes_the_merged_weights(run, english, tmp_path, caplog):
    brain, _, told = started(tmp_path / "new", english, caplog, init_from=str(run))
    assert same(state(brain), merged(run))
    assert "its LoRA merged into 3 weights" in told and "reinitialised" not in told and "left there" not in told
    rows = [line.split()[0] for line in told.splitlines() if " taken" in line]
    assert "Transformer.encoder" in rows and len(rows) == 9  # whole modules, of which some layers have a LoRA


@pytest.mark.slow
def test_a_recipe_with_the_same_lora_goes_on_with_base_and_adapters(run, english, tmp_path, caplog):
    brain, _, told = started(tmp_path / "new", english, caplog, recipe=overlay(tmp_path), init_from=str(run))
    assert same(state(brain), state(load_run(run, "cpu")[1]))
    assert "merged" not in told and "reinitialised" not in told
    trained = brain.hparams.trained  # its checkpoints rest on the base that it has now
    trained.start_afresh()
    (named,) = (tmp_path / "new" / "save").glob("base-*")
    assert named.name == next((run / "save").glob("base-*")).name


def test_another_lora_begins_as_nothing_on_top_of_what_was_trained(run, english, tmp_path, caplog):
    brain, _, told = started(tmp_path / "new", english, caplog, recipe=overlay(tmp_path, rank=3), init_from=str(run))
    assert "its LoRA merged" in told and "reinitialised" in told
    adapters.merge(brain.modules)
    assert same(state(brain), merged(run))


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.slow
def test_the_mean_of_several(run, english, tmp_path, caplog, rank):
    lora = {} if rank is None else {"recipe": overlay(tmp_path, rank)}
    brain, _, told = started(tmp_path / "new", english, caplog, init_from=str(run), init_average=2, **lora)
    adapters.merge(brain.modules)
    assert same(state(brain), merged(run, weights=ChosenWeights(average=Mean(2))))
    assert "the mean of 2 checkpoints" in told


@pytest.mark.slow
def test_a_mean_with_a_source_that_lacks_the_lora_has_as_much_less_of_it(run, english, tmp_path):
    plain = run_with_model(tmp_path / "plain", english)
    brain = target(tmp_path / "new", english, recipe=overlay(tmp_path), init_from=str(plain))
    initial.load(brain)
    begun = state(brain)
    torch.manual_seed(0)
    for name, value in brain.modules.state_dict().items():
        if ".lora." in name:
            value.normal_()
    mean = initial.MeanWithSource(brain)
    trained, found = state(brain), {}
    for share in (0, 0.25, 1):
        mean.take(share)
        found[share] = state(brain)
    up, down = ([name for name in trained if name.endswith(f".lora.{place}.weight")] for place in (2, 1))
    assert len(up) == 3 and all(found[0][name].eq(0).all() for name in up)
    assert all(torch.equal(found[0][name], begun[name]) for name in begun if ".lora." not in name)
    assert all(torch.allclose(found[0.25][name], 0.25 * trained[name]) for name in up)
    assert all(torch.equal(found[0.25][name], trained[name]) for name in down)
    assert all(torch.allclose(found[1][name], trained[name]) for name in trained)


@pytest.mark.slow
def test_of_a_run_with_a_moving_average_that(english, tmp_path, caplog):
    averaged = run_with_model(tmp_path / "averaged", english, recipe=overlay(tmp_path), rates=(70.0,), ema_decay=0.9)
    (folder,) = averaged.glob("save/*epoch1*")
    kept = torch.load(folder / "ema.ckpt", weights_only=True)
    kept["updates"], kept["weights"] = 3, {
        name: value + 1 if ".lora." in name or name.startswith("3.") else value for name, value in
        kept["weights"].items()}
    torch.save(kept, folder / "ema.ckpt")
    next(folder.glob("*sums.json")).unlink()
    brain, _, _ = started(tmp_path / "new", english, caplog, init_from=str(averaged))
    assert same(state(brain), merged(averaged))
    assert torch.equal(state(brain)["model.3.w.bias"], kept["weights"]["3.w.bias"])


def test_what_only_the_recipe_knows_is_asked_for(run, english, tmp_path):
    (checkpoint,) = run.glob("save/*epoch2*")
    shutil.copytree(checkpoint, tmp_path / "lone")
    for path in (tmp_path / "lone", tmp_path / "lone" / "model.ckpt"):
        brain = target(tmp_path / "new", english, init_from=str(path))
        with refused("missing-base", key="init_from"):
            initial.load(brain)


@pytest.mark.parametrize("harm, code", [
    pytest.param(lambda path: path.unlink(), "missing-base", id="gone"),
    pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-4] + b"abcd"), "damaged-checkpoint", id="damaged")])
def test_a_base_that_is_gone_or_damaged_is_told(run, english, tmp_path, harm, code):
    copied = Path(shutil.copytree(run, tmp_path / "copied"))
    harm(next(copied.glob("save/base-*")))
    brain = target(tmp_path / "new", english, init_from=str(copied))
    with refused(code, wording=False):
        initial.load(brain)
