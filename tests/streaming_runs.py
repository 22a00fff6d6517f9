"""Small recognisers of hparams/streaming.yaml: prepared, built, and as a run's folder with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import run_folders
import torch

from sbkit.recipe import load
from sbkit.recipe.load import Recipe

RECIPE = Path(__file__).parents[1] / "hparams" / "streaming.yaml"
SMALL = {"d_model": 16, "nhead": 2, "num_encoder_layers": 2, "d_ffn": 16, "cnn_channels": 4, "num_workers": 0}


def recipe(folder: Path, data: Path, path: Path = RECIPE, **keys: object) -> Recipe:
    """The recipe with a small model."""
    return load.open_recipe(path, {**SMALL, "output_folder": str(folder), "data_folder": str(data), **keys})


def prepared(folder: Path, data: Path, path: Path = RECIPE, **keys: object) -> Recipe:
    """A recipe whose corpus was prepared as a run does it, read again as its other ranks do."""
    given = {**SMALL, "output_folder": str(folder), "data_folder": str(data), **keys}
    return run_folders.prepared(path, given)[0]


def brain(made: Recipe) -> Any:  # of the recipe's own task
    """The task of a recipe, ready to train."""
    found = made.brain({"device": "cpu", "noprogressbar": True})
    found.init_optimizers()
    return found


def saved(folder: Path, data: Path, change: Callable[[Any], object], path: Path = RECIPE, **keys: object) -> Path:
    """A run as training leaves it, with one checkpoint of a model after this change of it."""
    given = {**SMALL, **keys, "output_folder": str(folder), "data_folder": str(data)}
    made, given = run_folders.prepared(path, given)
    (folder / "hyperparams.yaml").write_text("# from:\n# x\n" + load.merged(path, given))
    found = brain(made)
    change(found)
    found.checkpointer.save_checkpoint(meta={"WER": 50.0, "epoch": 1})
    found.checkpointer.wait()
    return folder


def trained(folder: Path, data: Path, path: Path = RECIPE, **keys: object) -> Path:
    """A run with a checkpoint, whose statistics are not those of its corpus and whose frames don't sound alike."""
    return saved(folder, data, _as_if_trained, path, **keys)


def _as_if_trained(brain: Any) -> None:  # of the recipe's own task
    brain.acoustic_model.normalize.set_statistics(torch.full((80,), -5.0), torch.full((80,), 2.0))
    torch.manual_seed(11)  # of one layer, too, it then hears words everywhere
    for weights in brain.acoustic_model.head.parameters():
        weights.data.normal_(std=2.0)
