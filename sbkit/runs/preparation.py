"""Preparation of a run: its folder, its manifests, and the task's files made from them."""

from __future__ import annotations

import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

from speechbrain.core import create_experiment_directory

from sbkit.data.columns import BatchColumns
from sbkit.data.splits import SPLITS
from sbkit.recipe import writing
from sbkit.recipe.arguments import CommandLine
from sbkit.recipe.load import Recipe
from sbkit.runs.keys import Bundles
from sbkit.score.run_files import ENVIRONMENT, RECIPE
from sbkit.system import disk
from sbkit.system.environment import inventory

LOG_CONFIG = Path(__file__).with_name("log-config.yaml")


def open_folder(recipe: Recipe, request: CommandLine) -> None:
    """Create the run's folder with the resolved recipe, the log and a record of the environment."""
    folder = Path(recipe.keys.folder)
    with disk.writing_into(folder, "--output_folder"):
        save_recipe(recipe, request)
        create_experiment_directory(
            folder, log_config=request.run_opts.log_config or str(LOG_CONFIG), save_env_desc=False)
        Path(folder, ENVIRONMENT).write_text(inventory(), encoding="utf-8")


def save_recipe(recipe: Recipe, request: CommandLine) -> None:
    """Write the resolved recipe with SpeechBrain's header and file name."""
    folder = Path(recipe.keys.folder)
    folder.mkdir(parents=True, exist_ok=True)
    head = f"# Generated {date.today()} from:\n# {os.path.abspath(request.path)}\n# yamllint disable\n"
    (folder / RECIPE).write_text(head + writing.text(recipe.tree), encoding="utf-8")


def prepare_data(recipe: Recipe, overrides: dict[str, Any], bundles: Bundles) -> dict[str, Any]:
    """Prepare manifests and the task's files on one rank; the others read them.

    bundles : opens the models that the task labels its corpus with

    Returns the overrides that follow from the corpus.
    """
    corpus, task = recipe.keys.corpus, recipe.task
    found = corpus.prepare(needed=SPLITS, needs_text=task.needs_text(), columns=task.columns)
    print(corpus.summary(), file=sys.stderr)
    manifests = {split: found[split] for split in SPLITS}
    follows: dict[str, Any] = dict(BatchColumns(task.columns, recipe.keys).list_classes(manifests["train"]))
    follows |= task.prepare(recipe.keys, manifests, overrides)
    task.label(recipe.keys, manifests, bundles)
    return follows
