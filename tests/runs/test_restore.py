"""A run's folder becomes its recipe and model again."""

import shutil
import sys
from pathlib import Path

import pytest
import run_folders
import torch
import yaml
from refusals import refused

from sbkit.errors import SbkitError
from sbkit.recipe import load
from sbkit.runs import restore
from sbkit.score.weights import ChosenWeights, Mean
from sbkit.train.averaging import EMA


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    home = tmp_path_factory.mktemp("restore")
    return run_folders.run_with_model(home / "run", run_folders.corpus(home / "data", train=12, dev=3, test=3))


@pytest.fixture
def moved(run, tmp_path):
    """A copy of the run elsewhere, which a test may change."""
    return Path(shutil.copytree(run, tmp_path / "else where" / "run"))


def saved(run, name):
    return torch.load(run / "save" / f"CKPT+{name}" / "model.ckpt", weights_only=True)


def same(brain, state) -> bool:
    now = brain.hparams.model.state_dict()
    return all(torch.equal(now[key].float(), state[key].float()) for key in state)


@pytest.mark.parametrize("choice, expected", [("best", "epoch2"), ("last", "within"), ("epoch1", "epoch1"),
                                              ("save/CKPT+epoch3", "epoch3")])
def test_each_way_of_naming_a_checkpoint_loads_that_one(run, choice, expected):
    recipe, brain = restore.load_run(run, "cpu", weights=ChosenWeights(choice))
    assert same(brain, saved(run, expected)) and not brain.modules.training
    assert recipe.keys.tokenizer.size == recipe.keys.output_neurons


def test_a_run_that_was_moved_is_read_where_it_is(run, moved):
    recipe, brain = restore.load_run(moved, "cpu")
    hparams = recipe.hparams
    assert hparams["output_folder"] == str(moved)
    assert str(hparams["corpus"].folder).startswith(str(moved))
    assert str(brain.checkpointer.checkpoints_dir) == str(moved / "save")
    assert hparams["data_folder"] == restore.read_run(run).hparams["data_folder"], "what lies elsewhere stays there"


def test_a_class_beside_the_recipe_of_a_run_is_found_again(moved, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    recipe = tmp_path / "code" / "hparams" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    (tmp_path / "code" / "beside_the_recipe.py").write_text("class Mine:\n    pass\n")
    text = (moved / "hyperparams.yaml").read_text()
    (moved / "hyperparams.yaml").write_text(f"# Generated from:\n# {recipe}\n{text}mine: !new:beside_the_recipe.Mine\n")
    assert type(restore.read_run(moved).hparams["mine"]).__name__ == "Mine"


def test_the_mean_is_of_the_best_and_has_their_mean_as_weights(run):
    _, brain = restore.load_run(run, "cpu", weights=ChosenWeights(average=Mean(2)))
    best, second = saved(run, "epoch2"), saved(run, "epoch3")
    mean = {key: (best[key].double() + second[key].double()) / 2 for key in best if best[key].is_floating_point()}
    now = brain.hparams.model.state_dict()
    for key, value in mean.items():
        torch.testing.assert_close(now[key], value.float(), rtol=1e-6, atol=1e-7)


def test_a_mean_has_the_statistics_of_the_best_checkpoint(moved):
    """Those of a normaliser are no weights, and their squares don't add up to a mean."""
    for each in (moved / "save").glob("CKPT*"):
        shutil.rmtree(each)

    def with_normaliser():
        recipe = restore.read_run(moved)
        recipe.keys.normalize.norm_type = "global"
        recipe.keys.checkpointer.add_recoverable("normalizer", recipe.keys.normalize)
        return restore.build(recipe, "cpu")

    trained = with_normaliser()
    norm, weight = trained.hparams.normalize, next(trained.hparams.model.parameters())
    for value, rate in ((1.0, 70.0), (2.0, 40.0), (6.0, 55.0)):
        norm.count, norm.glob_mean, norm.glob_std = int(10 * value), torch.full((80,), value), torch.full((80,), value)
        weight.data.fill_(value)
        trained.checkpointer.save_checkpoint(name=f"at{rate:.0f}", meta={"WER": rate})
    trained.checkpointer.wait()
    for checkpoint, mean, best in (("best", 4.0, 2.0), ("last", 4.0, 6.0)):
        brain = with_normaliser()
        used = restore.take_weights(brain, ChosenWeights(checkpoint, Mean(2)))
        assert [one.meta["WER"] for one in used] == ([40.0, 55.0] if checkpoint == "best" else [55.0, 40.0])
        norm, weight = brain.hparams.normalize, next(brain.hparams.model.parameters())
        assert torch.equal(weight.detach(), torch.full_like(weight, mean))
        assert norm.count == 10 * best
        assert torch.equal(norm.glob_mean, torch.full((80,), best))
        assert torch.equal(norm.glob_std, torch.full((80,), best))


def test_a_brain_that_is_restored_loads_weights_alone_and_leaves_the_recipes_checkpointer_as_it_is(run):
    recipe = restore.read_run(run)
    before = dict(recipe.keys.checkpointer.recoverables)
    brain = restore.build(recipe, "cpu")
    assert set(brain.checkpointer.recoverables) == {"model", "normalize"}
    assert set(before) == {"model", "counter"}, "of which the counter is no weight"
    assert brain.keys.checkpointer is brain.checkpointer and brain.trainer.moving_average is None
    assert recipe.keys.checkpointer.recoverables == before
    brain.checkpointer.add_recoverable("notes", {})
    assert "notes" not in brain.checkpointer.recoverables


def test_a_moving_average_is_what_is_loaded_where_the_run_kept_one(moved):
    hparams = restore.read_run(moved).hparams
    hparams["ema"] = EMA(hparams["model"], 0.5)
    trained = hparams["brain"](hparams["modules"], None, hparams, {"device": "cpu"}, hparams["checkpointer"])
    hparams["ema"].update()
    averages = {key: value.clone() for key, value in hparams["ema"].state_dict()["weights"].items()}
    for parameter in trained.modules.parameters():
        parameter.data.add_(1.0)
    trained.checkpointer.save_checkpoint(name="averaged", meta={"WER": 1.0})
    trained.checkpointer.wait()
    recipe = restore.read_run(moved)
    again = recipe.hparams | {"ema": EMA(recipe.hparams["model"], 0.5)}
    brain = restore.build(recipe._replace(hparams=again, keys=load.read_keys(again, moved)), "cpu")
    restore.take_weights(brain)
    assert same(brain, averages)


def test_nothing_but_the_model_is_taken_from_a_checkpoint_or_written(run):
    before = sorted(path.name for path in run.iterdir())
    _, brain = restore.load_run(run, "cpu")
    assert set(brain.checkpointer.recoverables) == {"model", "normalize"}
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize("spoil, code", [
    pytest.param(lambda run: shutil.rmtree(run), "no-such-path", id="all of it"),
    pytest.param(lambda run: (run / "hyperparams.yaml").unlink(), "not-a-run", id="its recipe"),
    pytest.param(lambda run: [shutil.rmtree(each) for each in (run / "save").glob("CKPT*")], "no-checkpoint",
                 id="its checkpoints"),
    pytest.param(lambda run: [shutil.rmtree(run / "save" / f"CKPT+epoch{i}") for i in (1, 2, 3)], "not-validated",
                 id="its validated checkpoints"),
    pytest.param(lambda run: [(each / "model.ckpt").write_bytes(b"cut") for each in (run / "save").glob("CKPT*")],
                 "damaged-checkpoint", id="half of each checkpoint"),
    pytest.param(lambda run: (run / "hyperparams.yaml").write_text(f"# resolved\noutput_folder: {run}\n"),
                 "run-of-script", id="a task"),
    pytest.param(lambda run: (run / "hyperparams.yaml").write_text(
        f"# resolved\noutput_folder: {run}\ncheckpointer: null\nbrain: !name:sbkit.tasks.ctc.CTC\n"),
        "no-checkpoint", id="a checkpointer")])
def test_what_is_missing_is_named(moved, spoil, code):
    spoil(moved)
    with refused(code, wording=code != "damaged-checkpoint"):  # which has sizes of files
        restore.load_run(moved, "cpu")


def test_a_missing_tokenizer_is_named(moved):
    shutil.rmtree(moved / "save")
    (moved / "save").mkdir()
    with pytest.raises(SbkitError, match="no tokenizer yet"):
        restore.load_run(moved, "cpu")


def test_the_folder_of_a_test_is_not_a_run(run):
    (own := run / "evaluations" / "test_only").mkdir(parents=True)
    with refused("not-a-run", file=own):
        restore.read_run(own)
    with refused("no-such-path"):
        restore.read_run(own.with_name("nosuch"))


def test_a_name_that_fits_none_or_several_lists_what_there_is(run):
    with refused("no-checkpoint", value="nosuch"):
        restore.load_run(run, "cpu", weights=ChosenWeights("nosuch"))
    with refused("no-checkpoint", value="epoch"):
        restore.load_run(run, "cpu", weights=ChosenWeights("epoch"))
    with refused("conflicting-options", key="average"):
        restore.load_run(run, "cpu", weights=ChosenWeights("epoch1", Mean(2)))


def test_a_run_that_still_trains_says_how_far_it_is_and_what_the_best_is_not(moved, caplog):
    newest = moved / "save" / "CKPT+within"
    state = yaml.safe_load((newest / "brain.ckpt").read_text())
    (newest / "counter.ckpt").write_text("2")
    for within, said in ((5, "1 of 12 epochs, 31 steps; its newest checkpoint, 5 steps into epoch 2, is not validated, "
                             "so only --checkpoint last uses it. The same command resumes it"),
                         (0, "1 of 12 epochs, 31 steps. The same command resumes it")):
        (newest / "brain.ckpt").write_text(yaml.safe_dump({**state, "optimizer_step": 31, "epoch_step": within}))
        recipe = restore.read_run(moved)
        caplog.clear()
        restore.warn_unfinished(recipe)
        assert caplog.messages == [f"{moved} has not finished: it has trained {said}"]
    (moved / "tested.json").touch()
    caplog.clear()
    restore.warn_unfinished(recipe)
    assert caplog.messages == []
